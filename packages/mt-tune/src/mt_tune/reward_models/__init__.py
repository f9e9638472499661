"""Reward models: a causal decoder with scores in place of its LM head, trained on pairs or on steps of answers."""
