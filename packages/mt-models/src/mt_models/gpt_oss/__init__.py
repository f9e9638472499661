"""GPT-OSS: mixtures of experts with attention sinks, windows in every second layer, and biases everywhere."""
