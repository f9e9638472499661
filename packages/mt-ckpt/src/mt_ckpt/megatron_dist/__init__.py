"""Megatron-Core's checkpoints in the `torch_dist` format: PyTorch's distributed checkpoint with Megatron's keys."""
