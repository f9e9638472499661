"""Llama 1, 2 and 3: RMSNorm, SwiGLU, grouped queries, rotary positions and their scalings."""
