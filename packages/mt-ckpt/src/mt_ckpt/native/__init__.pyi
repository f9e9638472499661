from .read import open_checkpoint as open_checkpoint
from .save import save_checkpoint as save_checkpoint
