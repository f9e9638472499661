"""Where the code of a reward function is, in a form that another process can load."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from mt_core.errors import ConfigError, did_you_mean

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FunctionReference:
    """A function of a module. file: its source, if it is not importable by name. options: keyword arguments of a
    function that returns the reward function, or the one argument of a registered reward's `build` (registered)."""

    module: str
    attribute: str
    file: str | None = None
    options: Mapping[str, Any] | None = None
    registered: bool = False

    def load(self) -> Callable[..., Any]:
        """Imports the module. Raises whatever its code raises, AttributeError for a name that it does not have, and
        TypeError for what cannot be called."""
        value = self.value()
        if self.registered:
            value = value(self.options or {})
        elif self.options is not None:
            value = value(**self.options)
        if not callable(value):
            raise TypeError(f"{self.module}:{self.attribute} is a {type(value).__name__} and cannot be called")
        return value

    def value(self) -> Any:
        """What the module has under the name. Raises whatever its code raises, and AttributeError."""
        if not self.registered and (folder := os.getcwd()) not in sys.path:
            # Last: no module of the working folder hides an installed one.
            sys.path.append(folder)
        module = importlib.import_module(self.module) if self.file is None else import_file(self.module, self.file)
        value: Any = reduce(getattr, self.attribute.split("."), module)
        return value


def import_file(name: str, file: str) -> ModuleType:
    """The module of a file, which stands under its name in sys.modules, so that pickle and dataclasses find it."""
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == file:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python source")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    # Modules beside the file, as for a script.
    if (folder := str(Path(file).parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module


def module_reference(name: str, modules: Sequence[str], key: str) -> FunctionReference:
    """MODULE:ATTRIBUTE, or MODULE.ATTRIBUTE as in TRL, of a module that rewards.modules names as one whose code runs.

    Raises ConfigError for another module. key: where the name stands.
    """
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    files = {Path(entry).stem if entry.endswith(".py") else entry: entry for entry in modules}
    if module not in files:
        raise ConfigError(
            f'{key}: "{name}" runs code of the module {module}, which rewards.modules={list(modules)} does '
            f'not name{did_you_mean(module, files)}; add "{module}" or its file there if you trust it'
        )
    file = str(Path(files[module]).resolve()) if files[module].endswith(".py") else None
    if file is not None and not Path(file).is_file():
        raise ConfigError(f"rewards.modules: there is no file {files[module]}")
    log.info("%s: runs code of %s", key.partition(".")[0], file or f"the module {module}")
    return FunctionReference(module, attribute, file)
