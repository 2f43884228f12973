"""How the weights of a run are spread over its processes, each by an engine of Accelerate."""
