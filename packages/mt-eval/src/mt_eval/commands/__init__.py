"""The commands of mt-eval."""
