from .comparison import Difference as Difference
from .comparison import Tolerances as Tolerances
from .comparison import compare as compare
from .run_record import RunRecord as RunRecord
from .small_config import shrink as shrink
from .small_runs import record as record
