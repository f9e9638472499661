"""Metrics of generated texts against references."""
