"""Tasks of lm-evaluation-harness (the package lm_eval) on models of mt."""
