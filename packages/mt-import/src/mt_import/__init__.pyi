from .output import configuration_text as configuration_text
from .readers.megatron import import_words as import_words
from .sources import import_file as import_file
