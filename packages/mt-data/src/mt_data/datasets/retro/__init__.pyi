from .nearest import chunks_of as chunks_of
from .nearest import nearest_chunks as nearest_chunks
from .stream import TokenStream as TokenStream
