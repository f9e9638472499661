"""Reinforcement learning: completions that the model draws itself, rewards, advantages and losses of a policy."""
