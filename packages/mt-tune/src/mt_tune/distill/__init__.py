"""Distillation: a student is trained on the distributions of a teacher."""
