"""Several adapters of one model in a batch: which rows of a forward pass are computed with which.

mt-infer knows no adapter itself: a distribution registers a set of them (`mt_register_adapter_sets`), which reads their
files and changes the layers of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mt_core.errors import ConfigError
from mt_core.kinds import Kind, Lazy, Spec
from mt_core.plugins import PluginHost

Run = tuple[str | None, int]
"""Positions that follow one another in a row: the name of their adapter (None: the base alone), and their number."""


class AdapterSet(Protocol):
    """The adapters that a model has at hand."""

    @property
    def names(self) -> Collection[str]: ...

    def load(self, name: str, folder: Path) -> None:
        """Raises ConfigError and CheckpointError for an adapter that is not one of this model."""
        ...

    def unload(self, name: str) -> None: ...

    def key(self, name: str | None) -> bytes:
        """What tells cached values of an adapter from those of others, also of one that had the name before."""
        ...

    def using(self, runs: Sequence[Run]) -> AbstractContextManager[None]:
        """In it the model computes the positions of a row [1, T] with their adapters."""
        ...


class BuildAdapterSet(Protocol):
    def __call__(self, model: Any, config: Any, ctx: Any, host: Any) -> AdapterSet:
        """model: in evaluation mode, with its weights. config: a mt_core.config.Config. ctx: its ParallelContext.

        Raises ConfigError for a model or a layout that adapters cannot serve.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AdapterSetSpec(Spec):
    """Adapters of a served model (mt serve --adapter)."""

    build: Lazy[BuildAdapterSet]


ADAPTER_SETS = Kind("adapter_sets", "a set of adapters", AdapterSetSpec, "mt-tune")


def build_adapter_set(model: Any, config: Any, ctx: Any, host: PluginHost) -> AdapterSet:
    """Set of adapters of the distribution that registers one. Raises PluginError without it."""
    adapters: AdapterSet = host[ADAPTER_SETS].get("peft", asker="--adapter").build.load()(model, config, ctx, host)
    return adapters


def named_folders(texts: Sequence[str]) -> dict[str, Path]:
    """NAME=DIR of the command line. Raises ConfigError for another form and for a name that is given twice."""
    folders: dict[str, Path] = {}
    for text in texts:
        name, separator, folder = text.partition("=")
        if not separator or not name or not folder:
            raise ConfigError(f"--adapter {text}: give the name in requests and the folder, as NAME=DIR")
        if name in folders:
            raise ConfigError(f"--adapter {text}: there is an adapter {name} already")
        folders[name] = Path(folder)
    return folders
