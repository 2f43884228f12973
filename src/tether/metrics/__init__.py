"""How a metric is reduced, and where it is written."""
