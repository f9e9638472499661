"""Comparison of two runs: the first step and quantity in which they part, and what explains it."""
