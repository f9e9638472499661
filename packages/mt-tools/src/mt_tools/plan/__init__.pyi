from .layout_search import search as search
from .layouts import LayoutPlan as LayoutPlan
from .layouts import Planner as Planner
from .layouts import RankPlan as RankPlan
from .machines import Machine as Machine
from .machines import get_machine as get_machine
