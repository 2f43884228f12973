"""The machine of a run: processes, devices and memory."""
