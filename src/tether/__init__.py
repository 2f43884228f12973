"""Tether: PPO-RLHF for Hugging Face language models."""

__version__ = "0.1.0"
