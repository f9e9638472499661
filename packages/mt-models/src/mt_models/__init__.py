"""Model families, each in a folder of its own: configuration, model, name maps."""
