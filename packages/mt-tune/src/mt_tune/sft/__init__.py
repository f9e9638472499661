"""Supervised fine-tuning: noise on embeddings, the loss `dft`, learning rates by layer."""
