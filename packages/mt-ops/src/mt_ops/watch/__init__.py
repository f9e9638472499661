"""A run that is going, read from its files: in the terminal and in a browser."""
