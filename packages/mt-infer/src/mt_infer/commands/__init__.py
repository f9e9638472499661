"""The commands of mt-infer."""
