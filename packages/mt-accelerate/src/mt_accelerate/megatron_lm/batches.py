"""A program's batches, in the names of transformers, as the fields that models and losses of mt take.

Labels are transformers' own: -100 is not counted, and the model of a causal language shifts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError, DataError
from mt_core.nn.model import contract

Fields = dict[str, Tensor]
ToFields = Callable[[Mapping[str, Tensor]], Fields]
IGNORED = -100


def fields_for(model: nn.Module, external: Mapping[str, Any], *, eod_mask_loss: bool = False) -> ToFields:
    """How a batch for this model is read. external: the config.json of its transformers model. eod_mask_loss: positions
    whose token ends a document are not counted; raises ConfigError for models other than causal ones."""
    inputs = contract(model).inputs
    if eod_mask_loss:
        if "decoder_tokens" in inputs or "tokentype_ids" in inputs or hasattr(model, "classification_head"):
            raise ConfigError(
                "MegatronLMPlugin(eod_mask_loss=True) is for causal language models, whose sequences hold several "
                "documents; leave the field out"
            )
        ends = end_of_document(external)
        return lambda batch: causal_fields(batch, ends)
    if "decoder_tokens" in inputs:
        return lambda batch: translation_fields(batch, external)
    if hasattr(model, "classification_head"):
        return lambda batch: classification_fields(batch, inputs)
    return masked_fields if "tokentype_ids" in inputs else causal_fields


def end_of_document(external: Mapping[str, Any]) -> list[int]:
    """Ids that end a document. Raises ConfigError for a model whose configuration has none."""
    ids = external.get("eos_token_id")
    if ids is None:
        raise ConfigError("eod_mask_loss=True needs eos_token_id in the model's config, the id that ends a document")
    return list(ids) if isinstance(ids, list | tuple) else [int(ids)]


def causal_fields(batch: Mapping[str, Tensor], ends: Sequence[int] = ()) -> Fields:
    """input_ids, labels (default: the input), attention_mask with padding behind the text: each [rows, S].

    ends: ids of tokens after which nothing is predicted.
    """
    if "loss_mask" in batch:
        return dict(batch)  # of a data set of mt
    # Known keys come first: a misspelled key would otherwise be left out without a word.
    _require_known(batch, ("input_ids", "labels", "attention_mask", "position_ids"))
    tokens = batch["input_ids"]
    # A program that cuts the last token off its input may leave the mask as it was; what lies behind the text masks
    # nothing, and transformers before version 5 reads it so.
    seen = batch.get("attention_mask", torch.ones_like(tokens))[:, : tokens.shape[1]]
    # attention_mask is not passed to the model: behind the text causality hides padding, and before it nothing would.
    if not bool((seen.diff(dim=1) <= 0).all()):
        raise DataError("attention_mask has padding before text; pad a causal language model's batches on the right")
    # transformers shifts labels within its models, mt in its data: position
    # i gets the label of i + 1, the last one none.
    following = batch.get("labels", tokens)[:, 1:].masked_fill(seen[:, 1:] == 0, IGNORED)
    labels = torch.cat([following, torch.full_like(following[:, :1], IGNORED)], dim=1)
    if ends:
        # By the input token: what follows the end of a document is the first token of another.
        labels = labels.masked_fill(torch.isin(tokens, torch.tensor(list(ends), device=tokens.device)), IGNORED)
    fields = {"tokens": tokens, **counted_labels(labels)}
    return {**fields, "position_ids": batch["position_ids"]} if "position_ids" in batch else fields


def masked_fields(batch: Mapping[str, Tensor]) -> Fields:
    """input_ids, attention_mask, token_type_ids, labels: each [rows, S]; next_sentence_label [rows]."""
    if "loss_mask" in batch:
        return dict(batch)
    _require_known(batch, ("input_ids", "attention_mask", "token_type_ids", "labels", "next_sentence_label"))
    names = {
        "input_ids": "tokens",
        "attention_mask": "padding_mask",
        "token_type_ids": "tokentype_ids",
        "next_sentence_label": "is_random",
    }
    return {**{names[name]: value for name, value in batch.items() if name in names}, **counted_labels(batch["labels"])}


def classification_fields(batch: Mapping[str, Tensor], inputs: tuple[str, ...]) -> Fields:
    """input_ids, attention_mask, token_type_ids: [rows, S]; labels [rows], the class of each text."""
    _require_known(batch, ("input_ids", "attention_mask", "token_type_ids", "labels"))
    fields = {"tokens": batch["input_ids"], **counted_labels(batch["labels"])}
    for name, ours in (("attention_mask", "padding_mask"), ("token_type_ids", "tokentype_ids")):
        if name in batch and ours in inputs:
            fields[ours] = batch[name]
    return fields


def translation_fields(batch: Mapping[str, Tensor], external: Mapping[str, Any]) -> Fields:
    """input_ids, attention_mask [rows, S]; labels [rows, T]; decoder_input_ids (default: labels shifted right)."""
    if "loss_mask" in batch:
        return dict(batch)
    _require_known(batch, ("input_ids", "attention_mask", "labels", "decoder_input_ids"))
    labels = batch["labels"]
    decoder = batch["decoder_input_ids"] if "decoder_input_ids" in batch else shift_right(labels, external)
    fields = {"encoder_tokens": batch["input_ids"], "decoder_tokens": decoder, **counted_labels(labels)}
    return {**fields, "encoder_mask": batch["attention_mask"]} if "attention_mask" in batch else fields


def shift_right(labels: Tensor, external: Mapping[str, Any]) -> Tensor:
    """[rows, T]: the start token, then the labels but the last, with padding for what is not counted."""
    start, pad = external.get("decoder_start_token_id"), external.get("pad_token_id")
    if start is None or pad is None:
        raise DataError("a batch without decoder_input_ids needs decoder_start_token_id and pad_token_id in the config")
    # As _shift_right of transformers' T5.
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == IGNORED, pad)


def counted_labels(labels: Tensor) -> Fields:
    """labels of any shape, -100 where there is none."""
    return {"labels": labels, "loss_mask": (labels != IGNORED).float()}


def _require_known(batch: Mapping[str, Tensor], known: tuple[str, ...]) -> None:
    if unknown := sorted(batch.keys() - set(known)):
        raise DataError(f"the model does not take {', '.join(unknown)}; a batch can have {', '.join(known)}")
    # known[1] is "labels" for causal models, whose labels default to the input; for others labels have to be given.
    if "input_ids" not in batch or ("labels" not in batch and known[1] != "labels"):
        raise DataError(f"the batch has {', '.join(batch) or 'nothing'}; it needs input_ids and labels")
