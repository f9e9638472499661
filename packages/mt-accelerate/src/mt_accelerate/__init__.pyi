from .accelerator import Accelerator as Accelerator
from .distributed_type import DistributedType as DistributedType
from .megatron_lm_plugin import MegatronLMPlugin as MegatronLMPlugin
