from .module import PreTrainedModelLike as PreTrainedModelLike
from .module import read_module as read_module
