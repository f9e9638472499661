"""Typed configuration: one tree, every value with the place it came from."""
