"""Generation from trained models: the engine, sampling, the server."""
