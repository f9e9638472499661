"""Merging of models: several checkpoints of one architecture become one, tensor by tensor."""
