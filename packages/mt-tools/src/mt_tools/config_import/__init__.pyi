from .megatron import import_script as import_script
from .megatron import import_words as import_words
from .output import configuration_text as configuration_text
from .result import ImportResult as ImportResult
from .sources import import_file as import_file
