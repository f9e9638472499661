"""Configurations of Megatron-LM, Megatron-Bridge, NeMo and Accelerate as ours, with an account of each argument."""
