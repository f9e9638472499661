"""Layers that all model families share, each declaring the layout of its parameters."""
