"""Frozen weights that are held as codes and scales, and dequantized where they are multiplied."""
