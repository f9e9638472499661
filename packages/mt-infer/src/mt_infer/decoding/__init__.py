"""Decode steps with static shapes: one new position of each sequence, in CUDA graphs."""
