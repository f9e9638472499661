from .save import save_checkpoint as save_checkpoint
