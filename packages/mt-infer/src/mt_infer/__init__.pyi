from .completions import Completion as Completion
from .completions import TextEvent as TextEvent
from .engine import InferenceEngine as InferenceEngine
from .requests import TokenEvent as TokenEvent
from .sampling.parameters import SamplingParameters as SamplingParameters
from .text import TextGenerator as TextGenerator
