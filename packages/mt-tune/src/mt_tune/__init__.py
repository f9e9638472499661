"""Fine-tuning, adapters, preferences, rewards and distillation, in the layouts of the trainer."""
