from .builtin import chunks_of as chunks_of
from .builtin import nearest_chunks as nearest_chunks
from .database import TokenStream as TokenStream
