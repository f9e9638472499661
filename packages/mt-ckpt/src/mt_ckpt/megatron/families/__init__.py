"""Our model families in Megatron's arguments: a module for those that are alike, each with both directions."""
