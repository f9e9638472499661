"""Opens the source checkpoint, identically in every process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mt_ckpt.convert.source import Progress, Source, identity_of
from mt_ckpt.convert.wrapped_readers import with_tokenizer, with_vocab_size, without_histories, without_padding
from mt_ckpt.model import expected_parameters, model_config
from mt_core.checkpoint_lookup import MODEL, open_checkpoint, open_with
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CheckpointReader, ConvertOptions
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.layout import ParameterLayout
from mt_core.plugins import PluginHost
from mt_core.specs import FEED_FORWARDS
from mt_core.train.checkpoint.state import require_fit

AUTO = "auto"


@dataclass(frozen=True)
class Request:
    """The arguments of `convert` that select the source. path: of the checkpoint itself."""

    path: Path
    loader: str = AUTO
    config: Path | None = None
    trim_vocabulary: bool = False
    true_vocab_size: int | None = None
    tokenizer: Path | None = None
    options: ConvertOptions = field(default_factory=ConvertOptions)


@dataclass(frozen=True)
class Prepared:
    """An open checkpoint, adapted to its configuration. opened: before anything was left out."""

    opened: CheckpointReader
    config: Config
    parameters: dict[str, ParameterLayout]
    source: Source

    @property
    def vocab_size(self) -> int | None:
        """None: the model has no vocabulary."""
        return getattr(self.config.model, "vocab_size", None)


def prepare(request: Request, host: PluginHost, progress: Progress = lambda done, total: None) -> Prepared:
    """Raises what `convert` raises for the source."""
    opened = open_named(request.path, request.loader, host, request.config)
    # Wrappers, from the inside out: without histories, upcycled, with another vocabulary, trimmed, with another
    # tokenizer. Each is what the next one reads.
    reader = upcycled(without_histories(opened), request.options, host)
    if request.true_vocab_size is not None:
        reader = with_vocab_size(reader, request.true_vocab_size, host)
    config = model_config(reader, host)
    parameters = expected_parameters(config, host)
    vocab_size = getattr(config.model, "vocab_size", None)
    # After the other vocabulary, whose padding would otherwise count as rows too many.
    reader = without_padding(reader, shapes_of(parameters), vocab_size, trim=request.trim_vocabulary)
    require_fit(reader, shapes_of(parameters), MODEL)
    if request.tokenizer is not None:
        reader = with_tokenizer(reader, request.tokenizer, vocab_size, host)
    vocabulary = (request.trim_vocabulary, request.true_vocab_size)
    # Everything that changes the written bytes: an interrupted conversion is resumed only if all of it is equal.
    identity = identity_of(request.path, request.options, *vocabulary, request.tokenizer, reader.metadata["config"])
    # Parameters for which the model declares a dtype (a router in fp32) keep it whatever --dtype says.
    declared = [name for name, layout in parameters.items() if layout.dtype is not None]
    source = Source(reader, identity, dtype=request.options.dtype, kept=declared, progress=progress)
    return Prepared(opened, config, parameters, source)


def open_named(path: Path, loader: str, host: PluginHost, config: Path | None = None) -> CheckpointReader:
    """Open with the named loader, or the one that recognizes the files."""
    if loader == AUTO:
        return open_checkpoint(path, host, config)
    return open_with(host[CHECKPOINT_LOADERS].get(loader, key="--loader"), path, host, config)


def shapes_of(parameters: dict[str, ParameterLayout]) -> dict[str, tuple[int, ...]]:
    return {name: layout.shape for name, layout in parameters.items()}


def upcycled(reader: CheckpointReader, options: ConvertOptions, host: PluginHost) -> CheckpointReader:
    """Upcycled to MoE, if requested.

    Raises ConfigError for a granularity of experts without upcycling.
    """
    if options.upcycle_experts is None:
        if options.granularity != 1:
            raise ConfigError(
                f"--granularity {options.granularity} says how narrow the experts of --upcycle-experts are; give that "
                "too, or leave it out"
            )
        return reader
    spec = host[FEED_FORWARDS].get("moe", asker="--upcycle-experts")
    assert spec.upcycle is not None
    experts, granularity = options.upcycle_experts, options.granularity
    moe_reader: CheckpointReader = spec.upcycle.load()(reader, host, num_experts=experts, granularity=granularity)
    return moe_reader
