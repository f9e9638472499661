"""Train steps as Accelerate's Megatron-LM plugin has them: how a batch is read, the model called, the loss computed.

Without one of a program's own the engine reads batches by `batches` and takes the model's loss, which is normalized by
the tokens of the global batch. A custom step replaces any of the three functions, and its loss of each micro-batch is
averaged over micro-batches and data-parallel ranks, as in Megatron.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_accelerate.megatron_lm.batches import (
    causal_fields,
    classification_fields,
    counted_labels,
    end_of_document,
    masked_fields,
    translation_fields,
)
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_accelerate.operations import avg_losses_across_data_parallel_group
from mt_core.config.metrics import configured_loss
from mt_core.config.schema import Config
from mt_core.errors import ConfigError, DataError
from mt_core.nn.loss import weighted_mean
from mt_core.plugins import PluginHost
from mt_models.heads.model import classification_loss, regression_loss

GetBatch = Callable[[Iterator[Mapping[str, Tensor]]], tuple[Any, ...]]
LossFunc = Callable[..., Any]
ForwardStep = Callable[[Iterator[Mapping[str, Tensor]], Callable[..., Any]], tuple[Any, Callable[[Any], Any]]]


class AbstractTrainStep(ABC):
    """A step of training. args: the configuration's keys as attributes, in Megatron's names.

    name: of the step. fields: what the tuple of `get_batch` holds, by the names of mt; None for what mt does not take.
    """

    fields: tuple[str | None, ...] = ()

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> GetBatch:
        """(iterator over a program's batches) -> a tuple."""

    @abstractmethod
    def get_forward_step_func(self) -> ForwardStep:
        """(iterator over batches, model) -> (its output, the loss as a function of it)."""

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> LossFunc:
        """(what the forward step binds, output) -> (loss, {name: value})."""


class _LanguageModelStep(AbstractTrainStep):
    """The parts that the steps below share. get_batch, loss_func: the functions in use, set by the engine."""

    get_batch: GetBatch
    loss_func: LossFunc

    def get_loss_func(self, accelerator: Any) -> LossFunc:
        return masked_mean


class GPTTrainStep(_LanguageModelStep):
    """Causal language models. A batch is tokens, labels, loss_mask, attention_mask (None), position_ids."""

    fields = ("tokens", "labels", "loss_mask", None, "position_ids")

    def __init__(self, args: Any) -> None:
        super().__init__("GPTTrainStep")
        self.args = args

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> GetBatch:
        # Looked up once, so that a model without eos_token_id is an error before training and not at the first batch.
        ends = end_of_document(vars(self.args)) if self.args.eod_mask_loss else ()

        def get_batch(data_iterator: Iterator[Mapping[str, Tensor]]) -> tuple[Any, ...]:
            fields = causal_fields(next(data_iterator), ends)
            tokens = fields["tokens"]
            # [rows, S]: every field has the rows of the batch, by which it is cut into micro-batches.
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            return tokens, fields["labels"], fields["loss_mask"], None, fields.get("position_ids", positions)

        return get_batch

    def get_forward_step_func(self) -> ForwardStep:
        def forward_step(data_iterator: Any, model: Callable[..., Any]) -> tuple[Any, Callable[[Any], Any]]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            # `model` is a ComputedOutput: the engine has run the model already.
            # The signature is that of Megatron's GPT.
            output = model(tokens, position_ids, attention_mask, labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


class BertTrainStep(_LanguageModelStep):
    """Masked language models. A batch is tokens, types, sentence_order, loss_mask, lm_labels, padding_mask."""

    fields = ("tokens", "tokentype_ids", "is_random", "loss_mask", "labels", "padding_mask")

    def __init__(self, args: Any) -> None:
        super().__init__("BertTrainStep")
        self.args = args

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> GetBatch:
        def get_batch(data_iterator: Iterator[Mapping[str, Tensor]]) -> tuple[Any, ...]:
            fields = masked_fields(next(data_iterator))
            return tuple(fields.get(str(name)) for name in self.fields)

        return get_batch

    def get_forward_step_func(self) -> ForwardStep:
        def forward_step(data_iterator: Any, model: Callable[..., Any]) -> tuple[Any, Callable[[Any], Any]]:
            tokens, types, sentence_order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            # (losses [rows, S], logits of the sentence order [rows, 2] or None)
            output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask, sentence_order)

        return forward_step

    def get_loss_func(self, accelerator: Any) -> LossFunc:
        return masked_mean_and_order


class ClassificationTrainStep(BertTrainStep):
    """Classes of texts. A batch is that of `BertTrainStep`, whose labels [rows] are the classes."""

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> GetBatch:
        def get_batch(data_iterator: Iterator[Mapping[str, Tensor]]) -> tuple[Any, ...]:
            fields = classification_fields(next(data_iterator), ("padding_mask", "tokentype_ids"))
            return tuple(fields.get(str(name)) for name in self.fields)

        return get_batch

    def get_forward_step_func(self) -> ForwardStep:
        def forward_step(data_iterator: Any, model: Callable[..., Any]) -> tuple[Any, Callable[[Any], Any]]:
            tokens, types, _, _, labels, padding_mask = self.get_batch(data_iterator)
            logits = model(tokens, padding_mask, tokentype_ids=types)
            return logits, partial(self.loss_func, labels)

        return forward_step

    def get_loss_func(self, accelerator: Any) -> LossFunc:
        return mean_classification_loss


class T5TrainStep(_LanguageModelStep):
    """Encoder-decoder models. A batch is encoder tokens, decoder tokens, loss_mask, labels, encoder mask."""

    fields = ("encoder_tokens", "decoder_tokens", "loss_mask", "labels", "encoder_mask")

    def __init__(self, args: Any) -> None:
        super().__init__("T5TrainStep")
        self.args = args

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> GetBatch:
        def get_batch(data_iterator: Iterator[Mapping[str, Tensor]]) -> tuple[Any, ...]:
            fields = translation_fields(next(data_iterator), vars(self.args))
            return tuple(fields.get(str(name)) for name in self.fields)

        return get_batch

    def get_forward_step_func(self) -> ForwardStep:
        def forward_step(data_iterator: Any, model: Callable[..., Any]) -> tuple[Any, Callable[[Any], Any]]:
            encoder, decoder, loss_mask, labels, mask = self.get_batch(data_iterator)
            losses = model(encoder, decoder, mask, None, mask, tokentype_ids=None, lm_labels=labels)
            return losses, partial(self.loss_func, loss_mask)

        return forward_step


def masked_mean(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """losses [rows, S] -> their mean over counted positions, and its average over data-parallel ranks."""
    # The mean over one micro-batch of one rank, as Megatron has it without calculate_per_token_loss:
    # micro-batches with few counted tokens weigh as much as full ones.
    loss = weighted_mean(output_tensor.float(), loss_mask)
    return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}


def masked_mean_and_order(
    loss_mask: Tensor, sentence_order: Tensor | None, output_tensor: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """losses [rows, S] and logits [rows, 2] -> the mean over counted positions plus the mean cross entropy of the
    sentence order over rows that have one (-1: none). sentence_order: [rows]. Raises ConfigError without it."""
    losses, order_logits = output_tensor
    loss, report = masked_mean(loss_mask, losses)
    if order_logits is None:
        return loss, report
    if sentence_order is None:
        raise ConfigError(
            "the model has a head for the order of sentences, and the batch has no next_sentence_label; add it, or "
            "prepare a model without the head (BertForMaskedLM)"
        )
    summed = F.cross_entropy(order_logits.float(), sentence_order.view(-1), ignore_index=-1, reduction="sum")
    order = summed / (sentence_order != -1).sum().clamp(min=1)
    return loss + order, {**report, "sop loss": avg_losses_across_data_parallel_group([order])[0]}


def mean_classification_loss(labels: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """labels [rows], logits [rows, C] -> the mean cross entropy of the rows with a label (-100: none); with one output
    the mean squared error. Raises DataError for labels of another shape."""
    if labels.ndim != 1:
        raise DataError(f"labels are {list(labels.shape)}; a classifier takes a class or number for each text, [rows]")
    batch = counted_labels(labels)
    losses = (regression_loss if logits.shape[1] == 1 else classification_loss)(logits, batch)
    loss, report = masked_mean(batch["loss_mask"], losses)
    return loss, {"loss": report["lm loss"]}


# -- choice of the train step ------------------------------------------------------------------------

STEPS = {"bert": BertTrainStep, "t5": T5TrainStep}
"""Model family -> its train step; others have that of classifiers, or of GPT."""
REPLACEMENTS = ("custom_train_step_class", "custom_get_batch_function", "custom_loss_function")
SPECIAL_IDS = ("decoder_start_token_id", "pad_token_id", "eos_token_id")


def build_handler(
    config: Config, plugin: MegatronLMPlugin, accelerator: Any, external: Mapping[str, Any], host: PluginHost
) -> AbstractTrainStep | None:
    """None where the engine's own loss is trained on. external: the config.json of the program's model.

    Raises ConfigError for a class that is no train step, and for a mean of micro-batches' means that the family's step
    does not compute.
    """
    # A wrapped loss needs logits and waits for the device: it is used only if the program changes something.
    if plugin.calculate_per_token_loss and all(getattr(plugin, name) is None for name in REPLACEMENTS):
        return None
    kind: Any = plugin.custom_train_step_class or _family_step(config, host)
    if not issubclass(kind, AbstractTrainStep):
        raise ConfigError(f"custom_train_step_class={kind.__name__} is no subclass of AbstractTrainStep")
    handler: Any = kind(_arguments(config, external), **(plugin.custom_train_step_kwargs or {}))
    handler.get_batch = batch_function(handler, plugin, accelerator)
    # Attributes that forward steps read, so that a function of the program replaces one part of the family's step.
    handler.loss_func = plugin.custom_loss_function or _called(handler.get_loss_func, accelerator)
    assert isinstance(handler, AbstractTrainStep)
    return handler


def _family_step(config: Config, host: PluginHost) -> type[AbstractTrainStep]:
    is_classifier = configured_loss(config, host).name in ("classification", "regression")
    return STEPS.get(config.model.family, ClassificationTrainStep if is_classifier else GPTTrainStep)


def batch_function(handler: AbstractTrainStep, plugin: MegatronLMPlugin, accelerator: Any) -> GetBatch:
    """The program's own, else that of the step."""
    get_batch: GetBatch | None = plugin.custom_get_batch_function
    return get_batch or _called(handler.get_batch_func, accelerator, plugin.megatron_dataset_flag)


def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    """With as many of the arguments as it takes: in Accelerate's documents these methods have none."""
    return method(*arguments[: len(signature(method).parameters)])


def _arguments(config: Config, external: Mapping[str, Any]) -> Namespace:
    """All keys as attributes, as Megatron's arguments; and the ids of special tokens of the transformers model."""
    ids = {name: external.get(name) for name in SPECIAL_IDS}
    keys = {key: value for section in config.to_dict().values() for key, value in dict(section).items()}
    return Namespace(**ids, **keys)
