from .evaluation import Evaluation as Evaluation
from .evaluation import evaluate as evaluate
from .perplexity.task import Perplexity as Perplexity
from .perplexity.texts import TextSet as TextSet
from .tasks import Sample as Sample
from .tasks import Task as Task
