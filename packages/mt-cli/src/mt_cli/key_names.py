"""What keys of the configuration are called in other software, as plugins register it."""

from __future__ import annotations

from collections.abc import Sequence

from mt_core.plugins import PluginHost


def names_of(key: str, host: PluginHost) -> dict[str, Sequence[str]]:
    """Software -> its names for a dotted key, of those that have one."""
    found = {spec.name: spec.names.load()().get(key, ()) for spec in host.key_names}
    return {software: names for software, names in found.items() if names}


def keys_called(name: str, host: PluginHost) -> list[str]:
    """The dotted keys that are called so somewhere."""
    return [key for spec in host.key_names for key, names in spec.names.load()().items() if name in names]


def sentences_about(name: str, host: PluginHost) -> list[str]:
    """What is said of a name that stands for no key."""
    explained = [(spec.name, spec.explain.load()(name)) for spec in host.key_names if spec.explain is not None]
    return [f"{name} ({software}): {sentence}" for software, sentence in explained if sentence is not None]
