"""Programs that give no Megatron-LM plugin: their own modules and optimizers, data-parallel over all ranks."""
