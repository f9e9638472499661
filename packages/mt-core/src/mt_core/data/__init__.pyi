from .loader import BatchReader as BatchReader
from .loader import RankBatch as RankBatch
from .loader import collate as collate
