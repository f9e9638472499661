"""How a model and a batch are divided over processes."""
