from .blend import BlendedDataset as BlendedDataset
from .gpt import GPTDataConfig as GPTDataConfig
from .gpt import GPTDataset as GPTDataset
from .gpt import build_gpt as build_gpt
