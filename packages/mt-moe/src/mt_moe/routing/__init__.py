"""Routing: scores, top-k, weights, load-balancing losses, load statistics."""
