"""Mixtral: Mistral whose every feed-forward is a mixture of experts."""
