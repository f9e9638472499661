from .retriever import Retriever as Retriever
