"""BERT: a bidirectional encoder with masked-word and sentence-order heads, in its own form and in Megatron's."""
