"""Granite-MoE: Llama with mixtures of experts, and a factor on embeddings, scores, residual branches and logits."""
