"""Processes that generate beside those that train."""
