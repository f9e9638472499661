"""Weights and cached positions in 8 or 4 bits."""
