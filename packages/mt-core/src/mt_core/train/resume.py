"""What may differ between the configuration of a checkpoint and that of the run that takes it up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mt_core.config.schema import Config
from mt_core.errors import CheckpointError
from mt_core.train.checkpointing import environment

FREE_KEYS = frozenset(
    {
        "train.exit_iteration",
        "train.eval_interval",
        "train.eval_iters",
        "train.num_threads",
        "train.device",
        "train.callbacks",
        "train.verify_replicas_interval",
        "train.sample_prompt",
        "train.sample_tokens",
        "data.num_workers",
        "data.prefetch_batches",
        "data.read_by",
        "data.tokenize_workers",
        "data.index_engine",
        "data.mmap_bin_files",
    }
)
"""Keys that change no weight of the run."""
FREE_SECTIONS = frozenset({"checkpoint", "logging"})


def differences(stored: Mapping[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    """(key, stored value, value now) for each key that could change the run."""
    now = config.to_dict()
    for section in now:
        if section in FREE_SECTIONS:
            continue
        old, new = stored.get(section, {}), now[section]
        for key in sorted({*old, *new}):
            if f"{section}.{key}" not in FREE_KEYS and old.get(key) != new.get(key):
                yield f"{section}.{key}", old.get(key), new.get(key)


def require_same_run(metadata: Mapping[str, Any], config: Config, origin: str) -> list[str]:
    """Raise CheckpointError for a difference that nobody accepted; returns the accepted ones, as text."""
    accepted: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    for key, old, new in differences(metadata["config"], config):
        change = f"{key}: {old} in the checkpoint, {new} now"
        taken = key in config.checkpoint.accept_changes and not key.startswith("model.")
        (accepted if taken else refused).append((key, change))
    if refused:
        raise CheckpointError(_refusal(refused, origin))
    if config.train.deterministic:
        _require_same_environment(metadata["environment"], origin)
    return [change for _, change in accepted]


def _refusal(refused: list[tuple[str, str]], origin: str) -> str:
    changes = "\n  ".join(change for _, change in refused)
    model = any(key.startswith("model.") for key, _ in refused)
    keys = ", ".join(f'"{key}"' for key, _ in refused)
    cure = (
        "A checkpoint goes on with the model it was made with only; use another --run-dir for another model"
        if model
        else f"If that is meant, add --set 'checkpoint.accept_changes=[{keys}]'"
    )
    return f"{origin} was made with another configuration:\n  {changes}\n{cure}"


def _require_same_environment(stored: Mapping[str, Any], origin: str) -> None:
    now = environment()
    changed = [f"{key}: {stored.get(key)} then, {now[key]} now" for key in now if stored.get(key) != now[key]]
    if changed:
        raise CheckpointError(
            f"{origin} cannot be continued bit for bit, as train.deterministic asks: {'; '.join(changed)}"
        )
