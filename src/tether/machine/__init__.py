"""The machine that a run has: its processes, devices and memory."""
