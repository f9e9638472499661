"""Megatron-Core's checkpoints in the `torch` format: a file for each tensor-, pipeline- and expert-parallel rank."""
