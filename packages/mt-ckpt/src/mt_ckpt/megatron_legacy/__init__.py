"""Megatron-LM's checkpoints from before Megatron-Core: its own names, and three orders of queries, keys and values."""
