"""Ways to distribute the weights of a run over its processes, one engine of Accelerate each."""
