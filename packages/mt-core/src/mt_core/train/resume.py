"""What may differ between the configuration of a checkpoint and that of the run that takes it up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
        "train.cuda_graphs",
        "train.cuda_graph_warmup_steps",
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
FREE_SECTIONS = frozenset({"checkpoint", "logging", "timeouts"})


class Change(NamedTuple):
    """A key whose value is another one than when the checkpoint was made."""

    key: str
    then: Any
    now: Any


def differences(stored: Mapping[str, Any], config: Config) -> Iterator[Change]:
    """Each key that could change the run and has another value."""
    now = config.to_dict()
    for section in now:
        if section in FREE_SECTIONS:
            continue
        old, new = stored.get(section, {}), now[section]
        for key in sorted({*old, *new}):
            if f"{section}.{key}" not in FREE_KEYS and old.get(key) != new.get(key):
                yield Change(f"{section}.{key}", old.get(key), new.get(key))


def require_same_run(metadata: Mapping[str, Any], config: Config, origin: str) -> list[Change]:
    """Raise CheckpointError for a difference that nobody accepted; returns the accepted ones."""
    accepted: list[Change] = []
    refused: list[Change] = []
    for change in differences(metadata["config"], config):
        taken = change.key in config.checkpoint.accept_changes and not change.key.startswith("model.")
        (accepted if taken else refused).append(change)
    if refused:
        raise CheckpointError(_refusal(refused, origin))
    if config.train.deterministic:
        _require_same_environment(metadata["environment"], origin)
    return accepted


def change_table(changes: Sequence[Change]) -> str:
    """Columns key, then, now; a line each."""
    rows = [("key", "then", "now"), *((change.key, str(change.then), str(change.now)) for change in changes)]
    key, then = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {row[0]:<{key}}  {row[1]:<{then}}  {row[2]}" for row in rows)


def _refusal(refused: list[Change], origin: str) -> str:
    changes = "\n  ".join(f"{key}: {then} in the checkpoint, {now} now" for key, then, now in refused)
    model = any(change.key.startswith("model.") for change in refused)
    keys = ", ".join(f'"{change.key}"' for change in refused)
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
