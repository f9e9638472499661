"""A model family and a callback for mt."""
