"""`mt retro`."""
