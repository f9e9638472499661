from .base import FunctionalOptimizer as FunctionalOptimizer
from .base import Optimizer as Optimizer
from .base import OptimizerBuildContext as OptimizerBuildContext
from .master_weights import Fp32MasterWeights as Fp32MasterWeights
from .param_groups import ParamGroup as ParamGroup
from .schedules import Horizon as Horizon
