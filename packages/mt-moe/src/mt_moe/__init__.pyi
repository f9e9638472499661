from .config import MoeConfig as MoeConfig
from .dispatchers.alltoall import AllToAllDispatcher as AllToAllDispatcher
from .dispatchers.interface import Dispatched as Dispatched
from .dispatchers.interface import Dispatcher as Dispatcher
from .dispatchers.interface import ExpertPlacement as ExpertPlacement
from .permutation import Routing as Routing
from .upcycling import upcycle as upcycle
