from .loader import BatchReader as BatchReader
