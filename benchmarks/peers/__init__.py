"""Other projects in the same harness, each run by the Python of its own virtual environment."""
