from .perplexity.task import Perplexity as Perplexity
from .perplexity.texts import TextSet as TextSet
from .results import Evaluation as Evaluation
from .running import evaluate as evaluate
from .tasks import Sample as Sample
from .tasks import Task as Task
