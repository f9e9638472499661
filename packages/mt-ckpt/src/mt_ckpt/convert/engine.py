"""Converts a checkpoint from one format to another, one tensor at a time on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from mt_ckpt.convert.prepare import AUTO, Prepared, Request, open_named, prepare, shapes_of
from mt_ckpt.convert.source import Progress, Source
from mt_ckpt.convert.verify import Verification, verify_conversion
from mt_ckpt.convert.workers import Workers
from mt_ckpt.convert.wrapped_readers import histories_of
from mt_ckpt.dcp.reader import READ_FROM
from mt_ckpt.hugging_face.family import FORMAT as HUGGING_FACE
from mt_ckpt.hugging_face.reader import HuggingFaceReader, detect
from mt_ckpt.hugging_face.tokenizer import CHAT_TEMPLATE, FILES, GENERATION, lost_settings, template_in_settings
from mt_ckpt.locate import resolve_run
from mt_ckpt.megatron.metadata import optimizer_left_out
from mt_ckpt.writing.options import refuse_scheme
from mt_ckpt.writing.output_folders import require_free, target_path
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import (
    CHECKPOINT_LOADERS,
    CHECKPOINT_SAVERS,
    CheckpointReader,
    CheckpointSaverSpec,
    ConvertCheckpoint,
    ConvertOptions,
)
from mt_core.errors import CheckpointError, ConfigError
from mt_core.paths import absolute, as_path, is_remote
from mt_core.plugins import PluginHost, load_plugins
from mt_core.specs import TRAINED_TEMPLATE
from mt_core.train.checkpoint.state import require_fit


@dataclass(frozen=True)
class Report:
    """What a conversion did. saver: the format, by its registered name. num_parameters counts elements of canonical
    tensors that were written.

    num_omitted_tensors: of the model, which the format leaves to another checkpoint, as a PEFT folder leaves the base.
    left_out: tensors of the source that the target does not have, such as optimizer state; patterns of those that are
    parts of a published model beside the one that is read, such as a tower of images.
    files_left_out: files of the source that the target does not have: of its tokenizer, chat template, generation; of
    the last, in parentheses, the settings that are missing where the target has others.
    has_tokenizer: whether tokenizer files were converted too, or the model has no vocabulary.
    read_from: of a format that does not say what its model is: which file did ("config"), whose names the tensors have
    ("names"), what else is in the files ("left_out").
    notes: what of the source is not as its configuration and names say, a sentence each: layers that its config.json
    counts and its files have not, and tensors that are left out for another one and differ from it; and what the target
    has no place for beside tensors and files, such as one of several ends of a text.
    optimizer_left_out: why the loader did not read the optimizer that is in the files; None: it did, or there is none.
    verification: None unless it was requested.
    """

    saver: str
    family: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    num_omitted_tensors: int = 0
    has_tokenizer: bool = True
    left_out: tuple[str, ...] = ()
    files_left_out: tuple[str, ...] = ()
    optimizer_left_out: str | None = None
    read_from: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    verification: Verification | None = None


def convert(
    load_dir: str | Path,
    save_dir: str | Path,
    *,
    saver: str,
    loader: str = AUTO,
    config: str | Path | None = None,
    options: ConvertOptions | None = None,
    dry_run: bool = False,
    verify: bool = False,
    trim_vocabulary: bool = False,
    tokenizer: str | Path | None = None,
    nproc: int = 1,
    true_vocab_size: int | None = None,
    host: PluginHost | None = None,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Write the checkpoint at `load_dir` to `save_dir` in the format of the saver named `saver`.

    load_dir: a checkpoint, or a run directory for its latest one. save_dir: a local folder, or of the formats mt and hf
    an address of an object store. loader: the name of a format, or "auto" for the
    one that recognizes the files. config: a file that says what the model is, of formats that do not.
    dry_run: every check, but nothing is written. verify: read the result again and
    compare every tensor bit for bit and the outputs of both models layer by layer. trim_vocabulary: drop rows of the
    embedding and the output beyond the vocabulary of the configuration, which are an error otherwise.
    true_vocab_size: the number of ids, where the checkpoint counts rows of padding too; they are kept as such.
    tokenizer: a folder with the files of a tokenizer, which are written in place of the source's. Histories of delayed
    FP8 scaling are left out: they are the run's. nproc: processes that write parts of the files at the same time, the
    same bytes as one; those beside this one have the plugins that are installed, whatever `host` is.

    Memory: in each process at most twice the largest tensor beside what the libraries take (`verify` holds a whole
    model for its last part). A conversion that was killed is resumed, if the saver supports it.

    Raises ConfigError for options that a format cannot express, PluginError for unknown formats, and CheckpointError
    for checkpoints that are missing, damaged or not those of their configuration; `save_dir` does not appear then.
    """
    host, options = host or load_plugins(), options or ConvertOptions()
    spec = host[CHECKPOINT_SAVERS].get(saver, key="--saver")
    refuse_scheme(spec.name, options, verify=verify)
    write, target = _writer(spec, nproc), target_path(save_dir, spec)
    # Before hours of writing: a format that no loader reads cannot be verified.
    if verify:
        host[CHECKPOINT_LOADERS].get(spec.name, asker=f"--verify after --saver {saver}")
    # Absolute, since other processes open it too.
    path = resolve_run(absolute(as_path(load_dir)))
    described = None if config is None else absolute(Path(config))
    chosen = None if tokenizer is None else absolute(as_path(tokenizer))
    request = Request(path, loader, described, trim_vocabulary, true_vocab_size, chosen, options)
    prepared = prepare(request, host, progress)
    source = prepared.source
    # Scales are a small part of a quantized checkpoint: a bad one is found before hours of writing.
    if isinstance(prepared.opened, HuggingFaceReader):
        prepared.opened.require_scales()
        source.activation_scales = prepared.opened.activation_scales()
    if dry_run:
        _rehearse(write, source, options, host)
        left_out = getattr(prepared.opened, "left_out", {})
        return _report(spec.name, prepared, left_out, files_without_place(spec, source))
    # Savers read it to decide which processes write.
    source.workers = Workers(nproc, request, spec.name) if nproc > 1 else None
    _write(write, target, source, options, host)
    written = _written_names(target, spec.name, prepared, host)
    left_out = [*histories_of(prepared.opened), *(name for name in source.unconverted() if name not in written)]
    left_out += getattr(prepared.opened, "left_out", {})
    verification = verify_conversion(source, target, spec, options, host, _judged_folder(request)) if verify else None
    report = _report(spec.name, prepared, left_out, unwritten_files(target, spec.name, source, host), verification)
    # A saver may write files of a tokenizer that the source describes by its name.
    return replace(report, has_tokenizer=report.has_tokenizer or any((target / name).is_file() for name in FILES))


def _judged_folder(request: Request) -> Path | None:
    """The folder of a source in Hugging Face's format, if transformers would compute the same from it as the result."""
    options = request.options
    changed = options.dtype is not None or options.upcycle_experts is not None
    changed = changed or request.trim_vocabulary or request.true_vocab_size is not None
    known = request.loader in (AUTO, HUGGING_FACE) and not is_remote(request.path) and detect(request.path)
    return request.path if known and not changed else None


def _report(
    saver: str,
    prepared: Prepared,
    left_out: Iterable[str] = (),
    files_left_out: Iterable[str] = (),
    verification: Verification | None = None,
) -> Report:
    source = prepared.source
    sizes = {MODEL + name: math.prod(layout.shape) for name, layout in prepared.parameters.items()}
    written = [name for name in sizes if name not in source.omitted_names]
    return Report(
        saver=saver,
        family=prepared.config.model.family,
        num_tensors=len(written),
        num_parameters=sum(sizes[name] for name in written),
        num_omitted_tensors=len(sizes.keys() & source.omitted_names) - len(source.dropped_names),
        num_bytes=source.num_bytes([name for name in source.names(MODEL) if name not in source.omitted_names]),
        has_tokenizer=bool(set(source.files()) - {GENERATION}) or prepared.vocab_size is None,
        left_out=tuple(left_out),
        files_left_out=tuple(files_left_out),
        optimizer_left_out=optimizer_left_out(source.metadata),
        read_from=source.metadata.get(READ_FROM, {}),
        notes=(*(prepared.opened.notes() if isinstance(prepared.opened, HuggingFaceReader) else ()), *source.notes),
        verification=verification,
    )


def _writer(spec: CheckpointSaverSpec, nproc: int) -> ConvertCheckpoint:
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: at least one process has to write")
    if nproc > 1 and spec.plan is None:
        raise ConfigError(f"--nproc {nproc}: one process writes the format {spec.name}; leave it out")
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


def _written_names(target: Path, saver: str, prepared: Prepared, host: PluginHost) -> set[str]:
    """Canonical names of what the target holds. Raises CheckpointError unless that is the whole model.

    By opening the target where a loader of the format is installed and the format holds all of the model, else by what
    the saver has read.
    """
    source = prepared.source
    # A saver of a plugin may have no loader beside it; of a part of a model the loader makes another one.
    if source.omitted_names or not host[CHECKPOINT_LOADERS].owners(saver):
        accounted = source.read_names | source.omitted_names
        unread = [name for name in prepared.parameters if MODEL + name not in accounted]
        if unread:
            raise CheckpointError(f"{target}: the saver {saver} left out {', '.join(unread[:8])}")
        return accounted
    written = open_named(target, saver, host)
    require_fit(written, shapes_of(prepared.parameters), MODEL)
    return set(written.shapes())


def unwritten_files(target: Path, saver: str, source: CheckpointReader, host: PluginHost) -> list[str]:
    """Names of the source's files of tokenizer, template and generation that the target does not have."""
    readable = host[CHECKPOINT_LOADERS].owners(saver)
    written = dict(open_named(target, saver, host).files()) if readable else {}
    # A format without files may have the template among its settings; a trained one is called chat_template.jinja.
    carried = {CHAT_TEMPLATE, TRAINED_TEMPLATE} if CHAT_TEMPLATE in written or template_in_settings(written) else set()
    carried |= set(written)
    names = [name for name in source.files() if name not in carried and not (target / name).is_file()]
    if lost := lost_settings(source.files().get(GENERATION, b"{}"), written.get(GENERATION)):
        names.append(f"{GENERATION} ({', '.join(lost)})")
    return sorted(names)


def files_without_place(saver: CheckpointSaverSpec, source: CheckpointReader) -> list[str]:
    """Names of the source's files that the format does not have, as it declares them."""
    return [] if saver.takes_file is None else sorted(filterfalse(saver.takes_file.load(), source.files()))


# -- rehearsing -------------------------------------------------------------------------------------


class _FirstReadError(Exception):
    """Ends a dry run when a saver has validated everything and begins to read."""


class _Unread(Source):
    """A source whose values are never read."""

    def __init__(self, source: Source) -> None:
        # Shares everything but `read`: no second opening of the checkpoint.
        self.__dict__.update(source.__dict__)
        self.workers = None

    def read(self, name: str) -> Tensor:
        raise _FirstReadError

    def read_external(self, name: str, source: str) -> Tensor:
        raise _FirstReadError


def _rehearse(write: ConvertCheckpoint, source: Source, options: ConvertOptions, host: PluginHost) -> None:
    """Run the saver's checks, up to its first read of a tensor."""
    # A folder of its own: a rehearsal never touches the target, nor work that could be resumed there.
    with TemporaryDirectory(prefix="mt-convert-") as folder:
        try:
            write(Path(folder) / "rehearsal", _Unread(source), options, host)
        except _FirstReadError:
            return
