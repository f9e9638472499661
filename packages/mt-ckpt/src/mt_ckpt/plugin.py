"""What mt-ckpt registers."""
