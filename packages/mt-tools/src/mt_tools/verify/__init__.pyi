from .comparison import Tolerances as Tolerances
from .comparison import compare as compare
from .small_config import shrink as shrink
from .small_runs import record as record
