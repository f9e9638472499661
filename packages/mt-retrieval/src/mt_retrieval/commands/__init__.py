"""`mt retrieve`."""
