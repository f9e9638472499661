"""What a command needs to be installed, checked without importing any of it."""

from __future__ import annotations

from importlib.util import find_spec

from mt_core.errors import PluginError
from mt_core.plugins import load_plugins

INSTALL = {"torch": '"mt-core[train]"'}
"""What to install for a name, where that is not the name itself."""
KIND_BROUGHT = {"mt-models": "models", "mt-data": "datasets", "mt-ckpt": "checkpoint_savers"}
"""A distribution that is wanted for a kind of thing, which any other plugin may bring instead."""


def need(*distributions: str, command: str) -> None:
    """Raise PluginError, saying what to install, if one of the distributions is missing.

    mt-models, mt-data and mt-ckpt are not missed when another plugin registers a model family, a data set
    or a checkpoint saver.
    """
    missing = [name for name in distributions if find_spec(name.replace("-", "_")) is None]
    if missing:
        missing = _not_replaced(missing)
    if missing:
        install = " ".join(INSTALL.get(name, name) for name in missing)
        raise PluginError(f"{command} needs {listed(missing)}; pip install {install}")


def _not_replaced(missing: list[str]) -> list[str]:
    host = load_plugins()
    return [name for name in missing if name not in KIND_BROUGHT or not host.registry(KIND_BROUGHT[name]).names()]


def listed(names: list[str]) -> str:
    """ "a, b and c" """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
