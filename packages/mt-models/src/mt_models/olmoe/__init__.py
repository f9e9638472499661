"""OLMoE: 64 small experts, and queries and keys normalized over all heads together."""
