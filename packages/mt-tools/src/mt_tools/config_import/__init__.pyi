from .megatron import import_words as import_words
from .output import configuration_text as configuration_text
