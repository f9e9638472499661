from .clean_options import CleanOptions as CleanOptions
from .clean_options import preset as preset
from .cleaning import clean as clean
from .decontamination import decontaminate as decontaminate
from .deduplication import dedup as dedup
from .options import DedupOptions as DedupOptions
from .options import OverlapOptions as OverlapOptions
from .running import RunOptions as RunOptions
