"""What mt-moe registers."""
