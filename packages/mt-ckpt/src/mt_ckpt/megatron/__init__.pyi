from .reader import open_checkpoint as open_checkpoint
