"""From tokens to experts: scores, choice, weights, balance losses, load."""
