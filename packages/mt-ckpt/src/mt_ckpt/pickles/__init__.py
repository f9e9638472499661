"""Files of torch.save, read without executing what is in them, and written a tensor at a time."""
