from .core import context_parallel_attention as context_parallel_attention
from .zigzag import shard_sequence as shard_sequence
from .zigzag import unshard_sequence as unshard_sequence
