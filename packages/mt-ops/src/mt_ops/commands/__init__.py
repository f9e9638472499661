"""Commands of mt-ops."""
