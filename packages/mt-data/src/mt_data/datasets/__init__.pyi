from .gpt import GPTDataConfig as GPTDataConfig
from .gpt import build_gpt as build_gpt
