"""A small RLHF pipeline on a real model: a reward adapter from preference pairs, PPO, a gold judge."""
