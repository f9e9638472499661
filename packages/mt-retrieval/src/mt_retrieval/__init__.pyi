from .answers import has_answer as has_answer
from .retriever import Retriever as Retriever
