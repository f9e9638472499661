"""Calls of tools in answers: a declaration for each form that models are trained on, and what reads answers by it."""
