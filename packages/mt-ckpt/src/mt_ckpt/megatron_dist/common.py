"""The non-tensor part of a distributed checkpoint: arguments, iteration, schedule, optimizer groups."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_ckpt.megatron.folder import find_iteration
from mt_ckpt.megatron.versions import Conventions, all_conventions
from mt_ckpt.megatron_dist.index import METADATA_FILE, Index
from mt_ckpt.pickles.torch_file import open_torch_file
from mt_core.errors import CheckpointError

COMMON_FILE = "common.pt"
"""Until Megatron-Core 0.18; since 0.19 the same is an object in the index."""
COMMON_KEY = "common_state/shard_0_1"
MARK_FILE = "metadata.json"
"""Written last, so that a checkpoint with it is complete."""
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def detect(path: Path) -> bool:
    """Whether `path` is, or its tracker names, a distributed checkpoint."""
    try:
        folder = find_iteration(path)
    except CheckpointError:
        return False
    # Both files: any other program's DCP folder has an index, but no mark.
    return (folder / METADATA_FILE).is_file() and (folder / MARK_FILE).is_file()


def require_backend(folder: Path) -> None:
    """Raises CheckpointError unless the folder says that it is complete and of the format that is read here."""
    file = folder / MARK_FILE
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: incomplete: it has no {MARK_FILE}, which Megatron writes last") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("sharded_backend") != BACKEND["sharded_backend"]:
        raise CheckpointError(f"{file}: sharded_backend is not torch_dist: {found}")


def newest_that_writes(folder: Path) -> Conventions:
    """What the version that wrote a folder can have been, as far as the folder shows."""
    with_file = (folder / COMMON_FILE).is_file()
    # The newest of those that agree with the folder: whether common.pt exists is all that it shows.
    return next(rules for rules in all_conventions() if rules.common_file == with_file)


def read_common(index: Index) -> Mapping[str, Any]:
    """Raises CheckpointError when it is missing."""
    file = index.folder / COMMON_FILE
    if file.is_file():
        value = open_torch_file(file).value
    elif COMMON_KEY in index.objects:
        value = index.objects[COMMON_KEY].value()
    else:
        raise CheckpointError(f"{index.folder}: has neither {COMMON_FILE} nor {COMMON_KEY}: no checkpoint of Megatron")
    # An object of the index is saved as a list of one (see `DistPlan`), the file holds the dictionary.
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise CheckpointError(f"{index.folder}: its common state is a {type(value).__name__}, expected a dictionary")
    return value
