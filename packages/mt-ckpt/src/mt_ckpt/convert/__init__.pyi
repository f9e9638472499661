from .engine import convert as convert
