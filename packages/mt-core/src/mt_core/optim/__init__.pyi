from .environment import OptimizerEnvironment as OptimizerEnvironment
from .functional import FunctionalOptimizer as FunctionalOptimizer
from .functional import Optimizer as Optimizer
from .master_weights import Fp32MasterWeights as Fp32MasterWeights
from .param_groups import ParamGroup as ParamGroup
from .schedules import Horizon as Horizon
