from .options import PreprocessOptions as PreprocessOptions
from .options import PreprocessReport as PreprocessReport
from .run import preprocess as preprocess
