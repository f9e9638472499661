"""Triton kernels of blocks, for GPUs. Imported where they are launched alone: Triton need not be installed."""
