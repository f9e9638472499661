from .comparison import Tolerances as Tolerances
from .comparison import compare as compare
from .run_record import record as record
from .small_config import shrink as shrink
