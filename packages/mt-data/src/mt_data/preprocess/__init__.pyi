from .options import PreprocessOptions as PreprocessOptions
from .run import preprocess as preprocess
