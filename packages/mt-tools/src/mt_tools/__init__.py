"""Plans, verifies and measures training."""
