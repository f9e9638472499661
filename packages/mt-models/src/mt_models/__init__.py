"""Model families, one per folder: configuration, model, name maps."""
