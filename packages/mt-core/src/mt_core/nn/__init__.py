"""Layers shared by all model families. Each declares the layout of its parameters."""
