"""Supervised training of retrievers: questions with positive and negative passages (Karpukhin et al., 2020)."""
