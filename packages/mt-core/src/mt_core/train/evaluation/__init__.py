"""Measurements on held-out data during training."""
