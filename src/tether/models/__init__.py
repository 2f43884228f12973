"""Models: loading and saving them, the roles they play, and their forward passes."""
