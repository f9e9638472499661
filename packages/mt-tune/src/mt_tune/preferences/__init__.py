"""Training by preferences: pairs of a chosen and a rejected answer, and answers that are wanted or not."""
