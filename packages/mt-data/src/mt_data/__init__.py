"""From raw text to training samples: tokenizers, indexed data sets, blends, preprocessing. Needs no torch."""
