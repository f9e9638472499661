"""Qwen2-MoE and Qwen3-MoE: Qwen with mixtures of many small experts."""
