"""The RLHF pipeline in small on a real model: a reward adapter from preference pairs, PPO, a gold judge."""
