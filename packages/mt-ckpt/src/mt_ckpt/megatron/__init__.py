"""Megatron-Core's checkpoints in the `torch` format: one file per tensor-, pipeline- and expert-parallel rank."""
