"""Mamba-2: state-space layers alone."""
