"""Models that choose: a class for a text, or one of several texts. On BERT's encoder and on causal decoders."""
