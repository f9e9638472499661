"""Token dispatchers, one per file: they send tokens to the ranks of their experts and the outputs back."""
