"""Which checkpoint a run resumes, and what may differ between its configuration and that of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mt_core.checkpoint_lookup import find_checkpoint
from mt_core.config.checks import global_batch_size
from mt_core.config.fields import Section
from mt_core.config.schema import CORE_SECTIONS, CheckpointConfig, Config
from mt_core.errors import CheckpointError
from mt_core.interfaces import Tokenizer
from mt_core.plugins import PluginHost
from mt_core.specs import LOSSES, MODELS, SECTIONS
from mt_core.train.checkpoint.run_directory import RunDirectory
from mt_core.train.checkpoint.state import GLOBAL_BATCH, environment

# -- fingerprints of the training data, stored in checkpoints ----------------------------------------
#
# Blend, split and seed are configuration values. The fingerprints of the data sets and of the tokenizer show whether
# the files they name have changed.

CONTENT, TOKENIZER = "data.content", "tokenizer.content"
"""Not configuration keys, but checkpoint.accept_changes accepts them in the same way."""


class Change(NamedTuple):
    """A key whose value differs from the one in the checkpoint."""

    key: str
    then: Any
    now: Any


def data_identity(train_data: Any, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Fingerprints by key. A data set without `fingerprint()`, such as a caller's own class, has no entry."""
    sources = {CONTENT: train_data, TOKENIZER: tokenizer}
    fingerprints = {key: getattr(source, "fingerprint", None) for key, source in sources.items()}
    return {key: str(fingerprint()) for key, fingerprint in fingerprints.items() if fingerprint is not None}


def data_changes(stored: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    """The fingerprints that differ. A fingerprint that either side lacks is not compared."""
    for key in sorted(stored.keys() & now.keys()):
        if stored[key] != now[key]:
            # 16 digits are enough to show that two hashes differ.
            yield Change(key, stored[key][:16], now[key][:16])


FREE_KEYS = frozenset(
    {
        "train.exit_iteration",
        "train.exit_duration_in_mins",
        "train.eval_interval",
        "train.eval_iters",
        "train.full_validation",
        "train.eval_metrics",
        "train.num_threads",
        "train.check_memory",
        "train.deferred_metrics",
        "train.keep_freed_memory",
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
        "data.verify_checksums",
        "data.data_cache_path",
        "parallel.pipeline_backward_communicator",
        "parallel.overlap_param_gather",
        "parallel.fsdp_reshard_after_forward",
        "recompute.cpu_offloading_num_layers",
        "recompute.offload_modules",
        "recompute.min_offloaded_tensor_size",
    }
)
"""Keys that do not affect the trained weights."""
BATCH_KEY = f"train.{GLOBAL_BATCH}"
BACKEND = "attention_backend"
MAIN_WEIGHTS = "optimizer.main_weights"
FREE_SECTIONS = frozenset({"checkpoint", "logging", "timeouts"})


def find_resume(directory: RunDirectory | None, config: CheckpointConfig) -> Path | None:
    """The checkpoint to resume: the newest of the run directory, else of checkpoint.resume_from.

    Raises CheckpointError when there is one and checkpoint.resume=never, or none and one is required.
    """
    newest = directory.find(config.ckpt_step) if directory is not None else None
    if config.resume == "never" and newest is not None:
        raise CheckpointError(
            f"checkpoint.resume=never, but {newest} exists; choose another --run-dir or remove that one"
        )
    path = newest
    if newest is None and config.resume_from is not None:
        path = find_checkpoint(config.resume_from, config.ckpt_step)
    if path is None and (config.resume == "required" or config.ckpt_step is not None):
        where = directory.checkpoints if directory is not None else "no run directory was given, so it"
        key = "resume=required" if config.resume == "required" else f"ckpt_step={config.ckpt_step}"
        raise CheckpointError(f"checkpoint.{key}, but {where} has no checkpoint")
    return path


def differences(stored: Mapping[str, Any], config: Config, host: PluginHost) -> Iterator[Change]:
    """The keys that affect the run and whose values differ."""
    now = config.to_dict()
    brought = {spec.name for spec in host[SECTIONS] if spec.affects_training}
    for section in [name for name in now if name in brought or name in CORE_SECTIONS.keys() - FREE_SECTIONS]:
        old, new = stored.get(section, {}), now[section]
        defaults = _defaults(config.named(section))
        for key in sorted({*old, *new}):
            # An older version wrote the checkpoint, before this key existed.
            added = key not in old and key in defaults
            if f"{section}.{key}" not in FREE_KEYS and not added and old.get(key) != new.get(key):
                yield Change(f"{section}.{key}", old.get(key), new.get(key))


def _defaults(section: Section) -> set[str]:
    """The keys that have their default. A checkpoint of before such a key was added is of a run that did the same."""
    fields = type(section).model_fields
    return {
        key for key, field in fields.items() if field.get_default(call_default_factory=True) == getattr(section, key)
    }


def require_same_run(metadata: Mapping[str, Any], config: Config, origin: str, host: PluginHost) -> list[Change]:
    """Returns the accepted differences. Raises CheckpointError for any that checkpoint.accept_changes does not name.

    Implementations of the same loss or attention, which differ in rounding, and forms of the master weights count as
    different with train.deterministic only.
    """
    changed: Iterable[Change] = _with_batch(differences(metadata["config"], config, host), metadata, config)
    if not config.train.deterministic:
        # Such a change moves the loss by rounding alone, which continues the run in all but its bits.
        family = host[MODELS].get(config.model.family, key="model.family")
        changed = (change for change in changed if not _is_other_rounding(change, host, family.default_loss))
    changes = _require_accepted(changed, config, origin)
    if config.train.deterministic:
        _require_same_environment(metadata["environment"], origin)
    return changes


def _with_batch(changes: Iterable[Change], metadata: Mapping[str, Any], config: Config) -> Iterator[Change]:
    """The changes with the global batch sizes in place of those of the key, without which it follows from the ranks."""
    size = global_batch_size(config)
    # Older checkpoints lack the size; for them the key is compared.
    then = metadata.get(GLOBAL_BATCH)
    yield from (change for change in changes if then is None or change.key != BATCH_KEY)
    if then is not None and then != size:
        yield Change(BATCH_KEY, then, size)


def _is_other_rounding(change: Change, host: PluginHost, default_loss: str) -> bool:
    """Whether the two are implementations of the same loss, or differ in the implementation of attention, or in the
    form of the fp32 master weights, which a checkpoint holds in fp32. default_loss: of a checkpoint that names none, as
    those of Megatron."""
    if change.key.startswith("model."):
        return change.key == f"model.{BACKEND}" or _without_backend(change.then) == _without_backend(change.now)
    if change.key != "train.loss":
        return change.key == MAIN_WEIGHTS
    base = {spec.name: spec.equivalent_to or spec.name for spec in host[LOSSES]}
    then = default_loss if change.then is None else change.then
    return base.get(then, then) == base.get(change.now, change.now)


def _without_backend(value: Any) -> Any:
    """Keys of a part of a model, such as the decoder of LLaVA, without its attention backend."""
    return {key: entry for key, entry in value.items() if key != BACKEND} if isinstance(value, dict) else value


def require_same_data(stored: Mapping[str, str], now: Mapping[str, str], config: Config, origin: str) -> list[Change]:
    """Compare the `data_identity` of the checkpoint with that of this run, by the rules of `require_same_run`.

    Other content follows from another data key (another tokenizer key), and is accepted with it.
    """
    # The content fingerprint of a data set changes with every key that selects data.
    sections = {key.partition(".")[0] for key in config.checkpoint.accept_changes}
    changes = (change for change in data_changes(stored, now) if change.key.partition(".")[0] not in sections)
    return _require_accepted(changes, config, origin)


def _require_accepted(changes: Iterable[Change], config: Config, origin: str) -> list[Change]:
    accepted: list[Change] = []
    refused: list[Change] = []
    for change in changes:
        # A changed model has other tensors, and no acceptance makes them fit.
        taken = change.key in config.checkpoint.accept_changes and not change.key.startswith("model.")
        (accepted if taken else refused).append(change)
    if refused:
        raise CheckpointError(_refusal(refused, origin))
    return accepted


def change_table(changes: Sequence[Change]) -> str:
    """Columns key, then, now; a line each."""
    rows = [("key", "then", "now"), *((change.key, str(change.then), str(change.now)) for change in changes)]
    key, then = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {row[0]:<{key}}  {row[1]:<{then}}  {row[2]}" for row in rows)


def _refusal(refused: list[Change], origin: str) -> str:
    changes = "\n  ".join(f"{key}: {then} in the checkpoint, {now} now" for key, then, now in refused)
    model = any(change.key.startswith("model.") for change in refused)
    content = any(change.key in (CONTENT, TOKENIZER) for change in refused)
    reason = "The files that the configuration names hold something else than then. " if content else ""
    reason += "".join(f"{key}={then} keeps the batch. " for key, then, _ in refused if key == BATCH_KEY and then)
    keys = ", ".join(f'"{change.key}"' for change in refused)
    cure = (
        "A checkpoint goes on with the model it was made with only; use another --run-dir for another model"
        if model
        else "For a run of its own give another --run-dir. To go on with this one all the same, add --set "
        f"'checkpoint.accept_changes=[{keys}]'"
    )
    return f"{origin} was made with another configuration:\n  {changes}\n{reason}{cure}"


def _require_same_environment(stored: Mapping[str, Any], origin: str) -> None:
    now = environment()
    changed = [f"{key}: {stored.get(key)} then, {now[key]} now" for key in now if stored.get(key) != now[key]]
    if changed:
        raise CheckpointError(
            f"{origin} cannot be continued bit for bit, as train.deterministic requires: {'; '.join(changed)}"
        )
