"""Ways to carry tokens to the ranks of their experts and back, one a file."""
