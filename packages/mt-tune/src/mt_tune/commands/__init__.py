"""`mt tune`: a command for each way to go on training a model, over the configuration that `mt train` reads."""
