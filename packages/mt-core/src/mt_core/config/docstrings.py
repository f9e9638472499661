"""What the string below a key of a section says, read from the source of its class when it is shown.

Pydantic reads it while a class is made (`use_attribute_docstrings`), which is an eighth of the CPU time that a command
needs to load its configuration.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache

from mt_core.config.schema import Section


def key_docstrings(section: type[Section]) -> dict[str, str]:
    """Docstring of each key that has one, from the class that declares the key last; none where there is no source."""
    found: dict[str, str] = {}
    for declaring in reversed(section.__mro__):
        own = _of_module(declaring.__module__).get(declaring.__qualname__, {})
        found = {key: text for key, text in found.items() if key not in inspect.get_annotations(declaring)} | own
    return found


@cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """Of the classes at the top of a module: name -> key -> docstring."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError):  # a module that was built in, or typed into a session
        return {}
    return {node.name: _of_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for key, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                found[key.target.id] = inspect.cleandoc(text)
    return found
