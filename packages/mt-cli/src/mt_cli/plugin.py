"""What mt-cli registers."""
