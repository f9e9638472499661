"""Finds the checkpoints of a run and those that it starts from, and opens any registered format. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_core.checkpoint_base import with_base
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS
from mt_core.errors import CheckpointError, ConfigError
from mt_core.paths import as_path, children

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from mt_core.checkpoint_specs import CheckpointLoaderSpec, CheckpointReader
    from mt_core.plugins import PluginHost


CHECKPOINTS = "checkpoints"
"""Folder of a run directory."""
LATEST = "latest"
"""File in it that holds the name of the newest complete checkpoint."""
BEST = "best"
"""`RUN/best` stands for the checkpoint of the best evaluation (checkpoint.best_metric)."""
BEST_FILE = "best.json"
"""File in it that names that checkpoint, the metric and its value."""


@dataclass(frozen=True)
class BestRecord:
    """The best evaluation of a run. checkpoint: name of the folder."""

    checkpoint: str
    iteration: int
    metric: str
    value: float


def read_best(checkpoints: Path) -> BestRecord | None:
    """None when the run has no best checkpoint. Raises CheckpointError for a file that cannot be read."""
    file = checkpoints / BEST_FILE
    try:
        return BestRecord(**json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def best_name(checkpoints: Path) -> str | None:
    """The folder of the best checkpoint, None when there is none. Raises CheckpointError as `read_best` does."""
    record = read_best(checkpoints)
    return None if record is None else record.checkpoint


def _best_of(run: Path) -> Path | None:
    """The best checkpoint of a run directory, or of its folder of checkpoints."""
    names = ((folder, best_name(folder)) for folder in (run / CHECKPOINTS, run))
    return next((folder / name for folder, name in names if name is not None), None)


def folder_of_step(step: int) -> str:
    return f"iter_{step:07d}"


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints, None when there is none.

    Raises CheckpointError when the pointer to it cannot be read, or names a checkpoint that is not there.
    """
    pointer = checkpoints / LATEST
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}") from error
    path = checkpoints / name
    # A pointer to nothing is an error: training from the start again would overwrite the run.
    if not name or not path.is_dir():
        raise CheckpointError(
            f"{pointer} names {name or 'nothing'}, which is not there; checkpoints are {_listed(checkpoints)}"
        )
    return path


def checkpoint_of_step(checkpoints: Path, step: int) -> Path | None:
    """That of a step; None when there are no checkpoints at all. Raises CheckpointError when there are only others."""
    path = checkpoints / folder_of_step(step)
    if path.is_dir():
        return path
    if not any(children(checkpoints)):
        return None
    raise CheckpointError(
        f"checkpoint.ckpt_step={step}: {checkpoints} has no checkpoint of that step; it has {_listed(checkpoints)}"
    )


def _listed(checkpoints: Path) -> str:
    names = sorted(entry.name for entry in children(checkpoints) if entry.name.startswith("iter_"))
    return ", ".join(names) or "none"


def find_checkpoint(path: str | Path, step: int | None = None) -> Path:
    """A checkpoint given by its own path, by its run directory or that one's folder of checkpoints, or as RUN/best.

    step: of a run, take this step's instead of the newest. A path may be a URL of an object store.
    """
    location = as_path(path)
    # A folder that is really called "best" is taken as it is.
    if location.name == BEST and not location.is_dir() and (best := _best_of(location.parent)) is not None:
        location = best
    # Of a format that is one file, such as GGUF.
    if location.is_file():
        return location
    if not location.is_dir():
        raise CheckpointError(f"{location}: no such directory; give a run directory or a checkpoint in it")
    # A run directory has checkpoints/latest; its folder of checkpoints has latest itself.
    folders = [folder for folder in (location / CHECKPOINTS, location) if (folder / LATEST).is_file()]
    # Neither: the path is that of a checkpoint, whose format open_checkpoint() finds out.
    if not folders and not (location / CHECKPOINTS).is_dir():
        return location
    checkpoint = None
    if folders:
        checkpoint = newest_checkpoint(folders[0]) if step is None else checkpoint_of_step(folders[0], step)
    if checkpoint is None:
        raise CheckpointError(f"{location}: this run has no complete checkpoint yet")
    return checkpoint


def open_with(spec: CheckpointLoaderSpec, path: Path, host: PluginHost, config: Path | None = None) -> CheckpointReader:
    """Open a checkpoint with the given loader, and its base where it is a difference (`mt_core.checkpoint_base`).
    config: a file that says what the model is, of formats that do not.

    Raises ConfigError for a configuration that the format does not take, CheckpointError where the base is not there.
    """
    if config is None:
        return with_base(path, spec.open.load()(path, host), lambda base: open_checkpoint(find_checkpoint(base), host))
    if spec.open_described is None:
        raise ConfigError(
            f"--config {config}: checkpoints of the format {spec.name} say what their model is; leave it out"
        )
    return spec.open_described.load()(path, host, config=config)


def open_checkpoint(path: Path, host: PluginHost, config: Path | None = None) -> CheckpointReader:
    """Open a checkpoint of whatever format recognizes it. config: as of `open_with`.

    Raises CheckpointError when no loader, or more than one, does.
    """
    # All of them are tried: two that accept one path are an error, and not a choice by order of registration.
    loaders = [spec for spec in host[CHECKPOINT_LOADERS] if spec.detect.load()(path)]
    if len(loaders) == 1:
        return open_with(loaders[0], path, host, config)
    names = ", ".join(host[CHECKPOINT_LOADERS].names()) or "none (pip install mt-ckpt)"
    if loaders:
        both = " and ".join(spec.name for spec in loaders)
        raise CheckpointError(f"{path}: the loaders {both} both take it for theirs")
    raise CheckpointError(f"{path} is no complete checkpoint of a known format; loaders are {names}")


# -- checkpoints that a run starts from: `checkpoint.load`, or `checkpoint.load_parts` ---------------

MODEL = "model."


def open_start(load: str | Mapping[str, str], host: PluginHost) -> CheckpointReader:
    """The checkpoint of checkpoint.load, or of checkpoint.load_parts."""
    if isinstance(load, str):
        return open_checkpoint(find_checkpoint(load), host)
    return CheckpointParts({part: open_checkpoint(find_checkpoint(path), host) for part, path in load.items()})


class CheckpointParts:
    """Several checkpoints as that of a model of which each is a part (a mt_core.checkpoint_specs.CheckpointReader).

    The parameters of a part have its name before their own, if they do not begin with it already. The [model] section
    has the section of each checkpoint under the name of its part; tokenizer and files are those of the last part that
    has a tokenizer. Optimizers are left out.
    """

    def __init__(self, parts: Mapping[str, CheckpointReader]) -> None:
        self._sources: dict[str, tuple[CheckpointReader, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, dtype] = {}
        config: dict[str, Any] = {"model": {}}
        self.of_tokenizer: CheckpointReader | None = None
        for part, reader in parts.items():
            self._add_tensors(part, reader)
            section = reader.metadata["config"]
            config["model"][part] = dict(section["model"])
            if section.get("tokenizer"):
                config["tokenizer"] = section["tokenizer"]
                self.of_tokenizer = reader
        self.metadata: Mapping[str, Any] = {"iteration": 0, "config": config}

    def _add_tensors(self, part: str, reader: CheckpointReader) -> None:
        dtypes = reader.dtypes()
        for source, shape in reader.shapes().items():
            # Optimizer state and random streams are left out.
            if source.startswith(MODEL):
                name = MODEL + name_within(part, source.removeprefix(MODEL))
                self._sources[name], self._shapes[name], self._dtypes[name] = (reader, source), shape, dtypes[source]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> Mapping[str, dtype]:
        return self._dtypes

    def read(self, name: str) -> Tensor:
        if name not in self._sources:
            raise CheckpointError(f"none of the checkpoints of checkpoint.load_parts has the tensor {name}")
        reader, source = self._sources[name]
        return reader.read(source)

    def files(self) -> Mapping[str, bytes]:
        return {} if self.of_tokenizer is None else self.of_tokenizer.files()


def name_within(part: str, name: str) -> str:
    """Name of a part's parameter in the whole model."""
    return name if name.startswith(f"{part}.") else f"{part}.{name}"
