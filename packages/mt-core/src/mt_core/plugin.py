"""What mt-core registers."""
