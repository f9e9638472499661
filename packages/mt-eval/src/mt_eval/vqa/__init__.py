"""Questions about images, and captions."""
