"""The loss that the program computes which a checkpoint was written for: with its rows of padding, or its own model.

Equal tensors are not enough: Megatron's softmax runs over the padded vocabulary, and Transformers builds the model that
the configuration beside the tensors says.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mt_ckpt.convert.wrapped_readers import num_padding_rows, with_vocab_size
from mt_ckpt.hugging_face.family import family_named
from mt_ckpt.hugging_face.reader import open_checkpoint
from mt_ckpt.model import build_model, model_config
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config_map import read_hf_config
from mt_core.errors import CheckpointError
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.paths import is_remote
from mt_core.plugins import PluginHost
from mt_core.train.checkpoint.state import load_parameters

# -- samples: token ids for any model whose only inputs are token ids --------------------------------

NUM_TOKENS = 8
CHOOSING_HEAD = "multichoice_head"
"""Canonical name of the head that gives a score to each of several texts."""


def token_inputs(model: nn.Module, vocab_size: int) -> dict[str, Tensor] | None:
    """The same few ids for every input that must be given; None if something else must be given.

    int64 [1, NUM_TOKENS], or [1, 2, NUM_TOKENS] for a model that chooses one of several texts. Without ids in whose
    place a model takes pictures or sounds.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    # Inputs without a default; a mask or positions may be left out.
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    if not needed or not all(name.endswith("tokens") for name in needed):
        return None
    # Seeded: both models of a comparison get the same ids.
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, NUM_TOKENS) if hasattr(model, CHOOSING_HEAD) else (1, NUM_TOKENS)
    media: frozenset[int] = getattr(getattr(model, "config", None), "media_token_ids", frozenset())
    left = torch.tensor([token for token in range(vocab_size) if token not in media])
    return {name: left[torch.randint(0, len(left), shape, generator=generator)] for name in needed}


TOLERANCE = 1e-3
"""Tolerance in nats, for another order of summation."""
HUGGING_FACE = "hf"
COUNT_PADDING = ("megatron", "megatron-dist", "megatron-legacy")
"""Formats whose readers' softmax runs over the padding."""
MT, TRANSFORMERS = "mt", "transformers"
HEAD = "lm_head.weight"
TRANSFORMERS_NAMES = {
    "tokens": "input_ids",
    "encoder_tokens": "input_ids",
    "decoder_tokens": "decoder_input_ids",
}
"""Our input name -> that of Transformers' models."""


@dataclass(frozen=True)
class ReaderLoss:
    """Mean cross entropy in nats of the same few tokens. source: of the model that was read, as source_reader computes
    it. target: as the reader of what was written computes it. num_padding_rows: rows beside the vocabulary in its
    softmax. num_parameters: of the model that it builds."""

    reader: str
    source: float
    target: float
    num_padding_rows: int
    num_parameters: int
    source_reader: str = MT


def reader_loss(
    source: CheckpointReader,
    written: CheckpointReader,
    path: Path,
    saver: str,
    host: PluginHost,
    folder: Path | None = None,
) -> ReaderLoss | None:
    """None for a model whose output is no distribution over the vocabulary, and where the reader is not installed.

    folder: that of the source, if it is Hugging Face's and has the same tensors: where transformers is installed, it
    computes the loss of the source, so that both what is read and what is written are judged by other code.

    Raises CheckpointError for losses that differ by more than rows of padding with a mean logit would make them, and
    for names that the reader does not know.
    """
    judge = _judged_source(source, folder, host)
    if saver == HUGGING_FACE:
        return _by_transformers(source, path, host, judge)
    counts = saver in COUNT_PADDING
    first, rows = _padded(source, host) if counts else (source, 0)
    second, more_rows = _padded(written, host) if counts else (written, 0)
    num_ids = _vocab_size(source, host)
    before, after = model_loss(first, num_ids, host), model_loss(second, num_ids, host)
    if before is None or after is None:
        return None
    numel = sum(math.prod(shape) for name, shape in second.shapes().items() if name.startswith(MODEL))
    # A source that transformers reads has no rows of padding: its format does not tell them from others.
    before = before if judge.loss is None else judge.loss
    loss = ReaderLoss("Megatron" if counts else MT, before, after, more_rows, numel, judge.reader)
    # Rows whose logit is the mean of the others add at most their share to the sum of exp: log((ids + rows) / ids).
    _require_alike(loss, math.log1p(max(more_rows - rows, 0) / num_ids), fewer=more_rows < rows)
    return loss


def _require_alike(loss: ReaderLoss, allowed: float, *, fewer: bool = False) -> None:
    """allowed: difference that padding rows may cause. fewer: whether the target has fewer of them than the source."""
    higher = loss.target - loss.source
    # A lower loss is right only if rows of padding were dropped.
    if higher > allowed + TOLERANCE or (higher < -TOLERANCE and not fewer):
        raise CheckpointError(
            f"written, but {loss.reader} computes another loss from it: {loss.target:.5f}, and the source has "
            f"{loss.source:.5f} as {loss.source_reader} computes it; {loss.num_padding_rows} rows of padding are in "
            "its softmax, see --vocab-padding"
        )


def model_loss(reader: CheckpointReader, num_ids: int, host: PluginHost) -> float | None:
    """The loss of our model with the tensors of an open checkpoint, in fp32, for ids below num_ids.

    None for a model without a softmax over ids.
    """
    config = model_config(reader, host)
    model = build_model(config, host).eval()
    inputs = token_inputs(model, num_ids)
    if inputs is None:
        return None
    load_parameters(model.named_parameters(), reader, parameter_layouts(model), MODEL, ParallelContext())
    with torch.no_grad():
        return loss_of(model(**inputs), inputs, _vocab_size(reader, host))


def loss_of(output: Any, inputs: Mapping[str, Tensor], vocab_size: int) -> float | None:
    """Mean cross entropy of each next id, which is the same for all models: not what they were trained for, but it
    depends on every logit."""
    # transformers' name of the second is for a model with two heads (BERT).
    named = (getattr(output, name, None) for name in ("logits", "prediction_logits"))
    logits = output if isinstance(output, Tensor) else next((value for value in named if value is not None), None)
    # The last input: of an encoder and decoder the decoder's ids, to which the logits belong.
    ids = list(inputs.values())[-1]
    if logits is None or tuple(logits.shape) != (*ids.shape, vocab_size):
        return None
    # fp64: the sum over a vocabulary does not add to the difference that is judged.
    return float(F.cross_entropy(logits[0, :-1].double(), ids[0, 1:]))


def _padded(reader: CheckpointReader, host: PluginHost) -> tuple[CheckpointReader, int]:
    """The checkpoint with its padding as if it were ids, as Megatron's softmax has it, and the rows of it."""
    rows = num_padding_rows(reader)
    return (with_vocab_size(reader, _vocab_size(reader, host) + rows, host), rows) if rows else (reader, 0)


def _vocab_size(reader: CheckpointReader, host: PluginHost) -> int:
    return getattr(model_config(reader, host).model, "vocab_size", None) or 1


# -- Transformers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Judge:
    """Who computes the loss of the source. loss: by transformers; None: mt computes it."""

    reader: str = MT
    loss: float | None = None


def _judged_source(source: CheckpointReader, folder: Path | None, host: PluginHost) -> _Judge:
    if folder is None:
        return _Judge()
    try:
        loss_and_numel = _loss_by_transformers(source, folder, host)
    except Exception as error:  # of another program: the loss is ours then, and the report says why
        reason = str(error).partition("\n")[0]
        return _Judge(f"{MT} (transformers does not read it: {type(error).__name__}: {reason:.200})")
    return _Judge() if loss_and_numel is None else _Judge(TRANSFORMERS, loss_and_numel[0])


def _by_transformers(source: CheckpointReader, path: Path, host: PluginHost, judge: _Judge) -> ReaderLoss | None:
    before = model_loss(source, _vocab_size(source, host), host) if judge.loss is None else judge.loss
    after = None if before is None else _loss_by_transformers(source, path, host)
    if before is None or after is None:
        return None
    loss = ReaderLoss(TRANSFORMERS, before, after[0], 0, after[1], judge.reader)
    _require_alike(loss, 0.0)
    return loss


def _loss_by_transformers(source: CheckpointReader, path: Path, host: PluginHost) -> tuple[float, int] | None:
    """The loss and the number of parameters of the model that transformers builds from a folder. None where it is not
    installed or has no class for the type, and for a model whose output is no distribution over the vocabulary."""
    num_ids = _vocab_size(source, host)
    inputs = token_inputs(build_model(model_config(source, host), host, "meta"), num_ids)
    if inputs is None or is_remote(path) or find_spec("transformers") is None:
        return None
    if not _has_class(path):
        return None
    config = model_config(source, host).model
    model, is_headless = _transformers_model(path, _of_left_out_parts(config, host))
    with torch.no_grad():
        output = model(**{TRANSFORMERS_NAMES[name]: ids for name, ids in inputs.items()})
        if is_headless:
            head = open_checkpoint(path, host).read_external(HEAD)  # [vocabulary, hidden size]
            output = F.linear(output.last_hidden_state, head.float())
    loss = loss_of(output, inputs, num_ids)
    return None if loss is None else (loss, sum(parameter.numel() for parameter in model.parameters()))


def _has_class(path: Path) -> bool:
    """Whether transformers has a class for the model_type: some families are of other packages (RWKV-7)."""
    from transformers import CONFIG_MAPPING

    return read_hf_config(path)["model_type"] in CONFIG_MAPPING


def _of_left_out_parts(config: Any, host: PluginHost) -> Callable[[str], bool]:
    """Whether a name is that of a tensor which the family leaves out by its map, such as one of an image tower."""
    family = family_named(config.family, host)
    names = family.name_map(config)
    return lambda name: bool(names.left_out((name, family.spelling(config, name))))


def _transformers_model(path: Path, left_out: Callable[[str], bool]) -> tuple[nn.Module, bool]:
    """The model in fp32, and whether the folder has an LM head and the class none, as that of a decoder which
    transformers has with a head in a larger class alone.

    Raises CheckpointError for tensors that the class misses or does not know, but for those of parts that the family
    leaves out: the tower of such a larger class keeps initial values, which no text reads.

    Layers of multi-token prediction stand behind the others in the files, and its classes leave them out.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModel)
    with _without_messages():
        model, about = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True, local_files_only=True)
    first, predicting = (getattr(config, key, 0) or 0 for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    behind = tuple(f"model.layers.{number}." for number in range(first, first + predicting))
    mismatches = {what: set(about.get(what, ())) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    mismatches["unexpected_keys"] = {name for name in mismatches["unexpected_keys"] if not name.startswith(behind)}
    mismatches["missing_keys"] = {name for name in mismatches["missing_keys"] if not left_out(name)}
    is_headless = HEAD in mismatches["unexpected_keys"] and model.get_output_embeddings() is None
    if is_headless:
        mismatches["unexpected_keys"].remove(HEAD)
    problems = [
        f"{what.replace('_', ' ')} {', '.join(map(str, sorted(names)[:8]))}"
        for what, names in mismatches.items()
        if names
    ]
    if problems:
        raise CheckpointError(f"{path}: written, but transformers' {kind.__name__} has {'; '.join(problems)}")
    return model.eval(), is_headless


@contextmanager
def _without_messages() -> Iterator[None]:
    """Hides progress bars of Transformers, and its list of tensors that do not fit: for a folder just written here they
    would only interrupt the report, which names what is wrong."""
    from transformers.utils import logging

    enabled, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if enabled:
            logging.enable_progress_bar()
