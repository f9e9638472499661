"""What mt-models registers."""
