"""Programs with the Megatron-LM plugin: the program's objects are a configuration of mt, whose engine trains."""
