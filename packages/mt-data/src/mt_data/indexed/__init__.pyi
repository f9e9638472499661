from .dataset import IndexedDataset as IndexedDataset
from .verification import verify as verify
from .writer import IndexedDatasetWriter as IndexedDatasetWriter
