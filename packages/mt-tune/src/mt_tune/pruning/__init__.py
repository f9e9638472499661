"""Pruning: a smaller checkpoint of the layers, channels, heads and experts whose activations are largest."""
