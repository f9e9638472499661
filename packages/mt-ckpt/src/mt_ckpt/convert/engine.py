"""Converts a checkpoint from one format to another, a tensor at a time, in one process on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from mt_ckpt.convert.histories import histories_of, without_histories
from mt_ckpt.convert.model import expected_parameters, model_config
from mt_ckpt.convert.source import MODEL, Progress, Source, identity_of
from mt_ckpt.convert.targets import require_free, target_path
from mt_ckpt.convert.verify import Verification, verify_conversion
from mt_ckpt.convert.vocabulary import without_padding
from mt_ckpt.locate import resolve_run
from mt_ckpt.megatron.metadata import optimizer_left_out
from mt_core.config.schema import Config
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.layout import ParameterLayout
from mt_core.paths import absolute, as_path, is_remote
from mt_core.plugins import PluginHost, load_plugins
from mt_core.specs import CheckpointReader, CheckpointSaverSpec, ConvertCheckpoint, ConvertOptions
from mt_core.train.checkpointing import open_checkpoint, open_with, require_fit

AUTO = "auto"


@dataclass(frozen=True)
class Report:
    """What a conversion did. num_parameters counts elements of canonical tensors.

    left_out: tensors of the source that the target does not have, such as an optimizer's state.
    optimizer_left_out: why the loader did not read the optimizer that is in the files; None: it did, or there is none.
    verification: None unless it was asked for.
    """

    family: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    left_out: tuple[str, ...] = ()
    optimizer_left_out: str | None = None
    verification: Verification | None = None


def convert(
    load_dir: str | Path,
    save_dir: str | Path,
    *,
    saver: str,
    loader: str = AUTO,
    options: ConvertOptions | None = None,
    dry_run: bool = False,
    verify: bool = False,
    trim_vocabulary: bool = False,
    host: PluginHost | None = None,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Write the checkpoint at `load_dir` to `save_dir` in the format of the saver named `saver`.

    load_dir: a checkpoint, or a run directory for its latest one. save_dir: a local folder, or of the formats mt and hf
    an address of an object store. loader: the name of a format, or "auto" for the
    one that recognizes the files. dry_run: every check, but nothing is written. verify: read the result again and
    compare every tensor bit for bit and the outputs of both models layer by layer. trim_vocabulary: drop rows of the
    embedding and the output beyond the vocabulary of the configuration, which are an error otherwise. Histories of
    delayed FP8 scaling are left out: they are the run's.

    Memory: at most twice the largest tensor beside what the libraries take (`verify` holds a whole model for its
    last part). A conversion that was killed is gone on with where it was, where the saver can.

    Raises ConfigError for options that a format cannot express, PluginError for unknown formats, and CheckpointError
    for checkpoints that are missing, damaged or not those of their configuration; `save_dir` does not appear then.
    """
    host, options = host or load_plugins(), options or ConvertOptions()
    spec = host.checkpoint_savers.get(saver, key="--saver")
    write, target = _writer(spec), target_path(save_dir, spec)
    if verify:
        host.checkpoint_loaders.get(saver, asker=f"--verify after --saver {saver}")
    path = resolve_run(absolute(as_path(load_dir)))
    opened = _open(path, loader, host)
    reader = upcycled(without_histories(opened), options, host)
    config = model_config(reader, host)
    parameters = expected_parameters(config, host)
    vocab_size = getattr(config.model, "vocab_size", None)
    reader = without_padding(reader, _shapes(parameters), vocab_size, trim=trim_vocabulary)
    require_fit(reader, _shapes(parameters), MODEL)
    source = _source(reader, identity_of(path, options, trim_vocabulary), parameters, options, progress)
    if dry_run:
        _rehearse(write, source, options, host)
        return _report(config, parameters, source)
    _write(write, target, source, options, host)
    written = _written_names(target, saver, source, parameters, host)
    left_out = [*histories_of(opened), *(name for name in reader.shapes() if name not in written)]
    verification = verify_conversion(source, _open(target, saver, host), host) if verify else None
    return _report(config, parameters, source, left_out, verification)


def upcycled(reader: CheckpointReader, options: ConvertOptions, host: PluginHost) -> CheckpointReader:
    """With mixtures of experts in place of dense feed-forwards, where that is asked for.

    Raises ConfigError for a granularity of experts that nobody asked for.
    """
    if options.upcycle_experts is None:
        if options.granularity != 1:
            raise ConfigError(
                f"--granularity {options.granularity} says how narrow the experts of --upcycle-experts are; give that "
                "too, or leave it out"
            )
        return reader
    spec = host.feed_forwards.get("moe", asker="--upcycle-experts")
    assert spec.upcycle is not None
    experts, granularity = options.upcycle_experts, options.granularity
    made: CheckpointReader = spec.upcycle.load()(reader, host, num_experts=experts, granularity=granularity)
    return made


def _source(
    reader: CheckpointReader,
    identity: str,
    parameters: dict[str, ParameterLayout],
    options: ConvertOptions,
    progress: Progress,
) -> Source:
    declared = [name for name, layout in parameters.items() if layout.dtype is not None]
    return Source(reader, identity, dtype=options.dtype, kept=declared, progress=progress)


def _report(
    config: Config,
    parameters: dict[str, ParameterLayout],
    source: Source,
    left_out: Iterable[str] = (),
    verification: Verification | None = None,
) -> Report:
    return Report(
        family=config.model.family,
        num_tensors=len(parameters),
        num_parameters=sum(math.prod(layout.shape) for layout in parameters.values()),
        num_bytes=source.num_bytes(source.names(MODEL)),
        left_out=tuple(left_out),
        optimizer_left_out=optimizer_left_out(source.metadata),
        verification=verification,
    )


def _shapes(parameters: dict[str, ParameterLayout]) -> dict[str, tuple[int, ...]]:
    return {name: layout.shape for name, layout in parameters.items()}


def _open(path: Path, loader: str, host: PluginHost) -> CheckpointReader:
    if loader == AUTO:
        return open_checkpoint(path, host)
    return open_with(host.checkpoint_loaders.get(loader, key="--loader"), path, host)


def _writer(spec: CheckpointSaverSpec) -> ConvertCheckpoint:
    if spec.convert is None:
        raise ConfigError(f"--saver {spec.name}: this format is written by training only")
    return spec.convert.load()


def _write(write: ConvertCheckpoint, target: Path, source: Source, options: ConvertOptions, host: PluginHost) -> None:
    require_free(target)
    try:
        if not is_remote(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        write(target, source, options, host)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(
            f"{target}: not written: {error.strerror or error}{where}; put that right and run the same command again"
        ) from error


def _written_names(
    target: Path, saver: str, source: Source, parameters: dict[str, ParameterLayout], host: PluginHost
) -> set[str]:
    """Canonical names of what the target holds. Raises CheckpointError unless that is the whole model.

    By opening the target where a loader of the format is installed, else by what the saver has read.
    """
    if not host.checkpoint_loaders.owners(saver):
        unread = [name for name in parameters if MODEL + name not in source.read_names]
        if unread:
            raise CheckpointError(f"{target}: the saver {saver} left out {', '.join(unread[:8])}")
        return set(source.read_names)
    written = _open(target, saver, host)
    require_fit(written, _shapes(parameters), MODEL)
    return set(written.shapes())


# -- rehearsing -------------------------------------------------------------------------------------


class _FirstReadError(Exception):
    """Ends a rehearsal where a saver has checked everything and begins to read."""


class _Unread(Source):
    """A source whose values nobody gets."""

    def __init__(self, source: Source) -> None:
        self.__dict__.update(source.__dict__)

    def read(self, name: str) -> Tensor:
        raise _FirstReadError


def _rehearse(write: ConvertCheckpoint, source: Source, options: ConvertOptions, host: PluginHost) -> None:
    """Let the saver check everything that it checks before it reads the first tensor."""
    with TemporaryDirectory(prefix="mt-convert-") as folder:
        try:
            write(Path(folder) / "rehearsal", _Unread(source), options, host)
        except _FirstReadError:
            return
