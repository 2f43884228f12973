"""Benchmarks for a machine with a GPU."""
