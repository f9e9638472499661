from .config import ImageDataConfig as ImageDataConfig
from .pixels import as_input as as_input
from .shapes import draw as draw
