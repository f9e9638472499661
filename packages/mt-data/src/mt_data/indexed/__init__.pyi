from .dataset import IndexedDataset as IndexedDataset
from .memory import MemoryIndexedDataset as MemoryIndexedDataset
from .verification import VerifyReport as VerifyReport
from .verification import verify as verify
from .writer import IndexedDatasetWriter as IndexedDatasetWriter
