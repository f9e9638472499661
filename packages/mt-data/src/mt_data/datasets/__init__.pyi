from .gpt import GPTDataConfig as GPTDataConfig
from .gpt import build_gpt as build_gpt
from .sft.chat_templates import load_chat_template as load_chat_template
