"""Scores of models that choose a class or one of several texts: development sets, predictions, ensembles, seeds."""
