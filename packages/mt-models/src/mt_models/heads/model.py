"""Classification and multiple-choice heads on BERT and causal decoders. Parameters of the base keep their names.

Shapes: B batch, C classes, N texts to choose from, S sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.dropout import Dropout
from mt_core.nn.layout import normal
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.nn.loss import Loss, seen_labels
from mt_core.nn.model import Model
from mt_core.parallel.collectives import gather_copies
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import whole
from mt_models.bert.model import BertEncoder, Pooler, first_position
from mt_models.blocks.decoder import CausalDecoder, RotaryDecoder
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.gpt.model import GPTModel
from mt_models.heads.config import (
    BertClassificationConfig,
    BertMultipleChoiceConfig,
    GPTClassificationConfig,
    GPTMultipleChoiceConfig,
    LlamaClassificationConfig,
    LlamaMultipleChoiceConfig,
    ModernBertClassificationConfig,
)
from mt_models.modernbert.model import ModernBertModel, PredictionHead


class FeatureDropout(Dropout):
    """Dropout on [B, H], which all ranks that share a sequence have whole."""

    divides_positions = False


class TextVector(Model):
    """A base model that gives one feature vector per text: [B, S] -> [B, H], dropout included."""

    inputs: tuple[str, ...] = ("tokens", "tokentype_ids", "padding_mask")
    predicts_tokens = False
    config: Any
    ctx: ParallelContext

    def __init__(self, config: Any, context: ModelBuildContext) -> None:
        super().__init__(config, context)  # of the base model, next in line
        classifier_dropout = config.classifier_dropout
        rate = config.hidden_dropout if classifier_dropout is None else classifier_dropout
        self.classifier_dropout = FeatureDropout(rate, context.parallel)

    def text_vector(self, tokens: Tensor, tokentype_ids: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def new_head(self, outputs: int) -> ReplicatedLinear:
        raise NotImplementedError


class BertText(TextVector, BertEncoder):
    """The pooled first position."""

    inputs = TextVector.inputs

    def __init__(self, config: Any, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        self.pooler = Pooler(config, self.ctx)

    def text_vector(self, tokens: Tensor, tokentype_ids: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        x = self.hidden_states(tokens, tokentype_ids, padding_mask)
        return self.classifier_dropout(self.pooler(first_position(x, self.ctx)))

    def new_head(self, outputs: int) -> ReplicatedLinear:
        return ReplicatedLinear(self.config.hidden_size, outputs, self.ctx, init=normal(self.config.init_method_std))


class ModernBertText(TextVector, ModernBertModel):
    """The first position, or the mean of a text's, through the layer that masked words are predicted by, too."""

    inputs = ("tokens", "padding_mask")
    lm_head: Any  # PredictionHead

    def __init__(self, config: Any, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        # It reads vectors that all ranks have.
        self.lm_head = PredictionHead(config, replace(self.ctx, sequence_parallel=False))

    def text_vector(self, tokens: Tensor, tokentype_ids: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        x = self.hidden_states(tokens, None, padding_mask)
        pooled = first_position(x, self.ctx) if self.config.classifier_pooling == "cls" else self._mean(x, padding_mask)
        return self.classifier_dropout(self.lm_head(pooled))

    def _mean(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """[B, S, H], sharded along S with sequence parallelism -> [B, H]"""
        x = gather_copies(x, SEQUENCE_DIM, self.ctx.tp) if self.ctx.sequence_parallel else x
        if padding_mask is None:
            return x.mean(1)
        return (x * padding_mask[..., None]).sum(1) / padding_mask.sum(1, keepdim=True)

    def new_head(self, outputs: int) -> ReplicatedLinear:
        return ReplicatedLinear(self.config.hidden_size, outputs, self.ctx, init=normal(self.config.init_method_std))

    def encoders(self) -> Mapping[str, nn.Module]:
        """None: it gives classes, not vectors."""
        return {}


class DecoderText(TextVector, CausalDecoder):
    """The state at the last token. A mixin that precedes a causal decoder, whose output layer it leaves out.

    Padding may be on either side: it is a separate segment, and positions count tokens.
    """

    inputs = ("tokens", "padding_mask")
    continues_text = False
    is_divisible = False
    """The head reads the whole model's states."""
    decode_stage: None = None  # type: ignore[assignment]  # it generates nothing

    def __init__(self, config: Any, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        self.ctx = context.parallel
        # An untied LM head was built by the decoder's constructor; no name of it may be in the state dict.
        self.output_layer = None

    def logits(self, x: Tensor) -> Tensor:
        """The states themselves, which the head reads: [B, S, H]"""
        return gather_copies(x, SEQUENCE_DIM, self.ctx.tp) if self.ctx.sequence_parallel else x

    def text_vector(self, tokens: Tensor, tokentype_ids: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        # Whole texts of one length: the last position is the last token of each.
        if padding_mask is None:
            return self.classifier_dropout(self._states(tokens)[:, -1])
        counted = padding_mask.cumsum(1)
        # Positions count tokens: padding on the left has position 0, as the first token. As segment ids the mask is 1
        # for tokens and 0 for padding, which thus see only their own kind.
        x = self._states(tokens, (counted - 1).clamp(min=0), padding_mask)
        # argmax gives the first position at which all tokens have been counted: that of the last token.
        last = counted.argmax(1)
        return self.classifier_dropout(x[torch.arange(len(last), device=x.device), last])

    def _states(self, tokens: Tensor, position_ids: Tensor | None = None, segment_ids: Tensor | None = None) -> Tensor:
        return CausalDecoder.run_stage(self, whole(self.config.num_layers), None, tokens, position_ids, segment_ids)

    def new_head(self, outputs: int) -> ReplicatedLinear:
        init = normal(self.config.init_method_std)
        return ReplicatedLinear(self.config.hidden_size, outputs, self.ctx, init=init, bias=False)


class Classifier(TextVector):
    """tokens [B, S] -> logits [B, C]. A mixin that precedes the model of the feature vector."""

    def __init__(self, config: Any, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        self.classification_head = self.new_head(config.num_classes)

    def forward(
        self, tokens: Tensor, tokentype_ids: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        return self.classification_head(self.text_vector(tokens, tokentype_ids, padding_mask))


class Chooser(TextVector):
    """tokens [B, N, S] -> a score for each text [B, N]. A mixin that precedes the model of the feature vector."""

    def __init__(self, config: Any, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        self.multichoice_head = self.new_head(1)

    def forward(
        self, tokens: Tensor, tokentype_ids: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        # [B, N, S] -> [B N, S]: options are texts of one batch.
        flat = [None if x is None else x.flatten(0, 1) for x in (tokentype_ids, padding_mask)]
        vectors = self.text_vector(tokens.flatten(0, 1), *flat)
        # [B N, 1] -> [B, N], over which the softmax of the loss runs
        return self.multichoice_head(vectors).view(tokens.shape[:2])


class BertClassifier(Classifier, BertText):
    """BERT with a class for each text."""

    inputs = BertText.inputs


class ModernBertClassifier(Classifier, ModernBertText):  # type: ignore[misc]
    """ModernBERT with a class for each text."""

    inputs = ModernBertText.inputs


class BertChooser(Chooser, BertText):
    """BERT with a score for each of several texts."""

    inputs = BertText.inputs


class GPTClassifier(Classifier, DecoderText, GPTModel):  # type: ignore[misc]
    """GPT with a class for each text."""

    inputs = DecoderText.inputs


class GPTChooser(Chooser, DecoderText, GPTModel):  # type: ignore[misc]
    """GPT with a score for each of several texts."""

    inputs = DecoderText.inputs


class LlamaClassifier(Classifier, DecoderText, RotaryDecoder):  # type: ignore[misc]
    """Llama with a class for each text."""

    inputs = DecoderText.inputs


class LlamaChooser(Chooser, DecoderText, RotaryDecoder):  # type: ignore[misc]
    """Llama with a score for each of several texts."""

    inputs = DecoderText.inputs


def build_bert_classifier(config: BertClassificationConfig, context: ModelBuildContext) -> BertClassifier:
    return BertClassifier(config, context)


def build_bert_chooser(config: BertMultipleChoiceConfig, context: ModelBuildContext) -> BertChooser:
    return BertChooser(config, context)


def build_modernbert_classifier(
    config: ModernBertClassificationConfig, context: ModelBuildContext
) -> ModernBertClassifier:
    return ModernBertClassifier(config, context)


def build_gpt_classifier(config: GPTClassificationConfig, context: ModelBuildContext) -> GPTClassifier:
    return GPTClassifier(config, context)


def build_gpt_chooser(config: GPTMultipleChoiceConfig, context: ModelBuildContext) -> GPTChooser:
    return GPTChooser(config, context)


def build_llama_classifier(config: LlamaClassificationConfig, context: ModelBuildContext) -> LlamaClassifier:
    return LlamaClassifier(config, context)


def build_llama_chooser(config: LlamaMultipleChoiceConfig, context: ModelBuildContext) -> LlamaChooser:
    return LlamaChooser(config, context)


# -- losses, one value per sample --------------------------------------------------------------------


def classification_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """logits [B, C], batch["labels"] [B] -> losses [B] in fp32; loss_mask [B] leaves out samples without a label."""
    return F.cross_entropy(logits.float(), seen_labels(batch), reduction="none")


def build_classification_loss(config: Config, parallel: ParallelContext | None = None) -> Loss:
    return classification_loss


def regression_loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """outputs [B, 1], batch["labels"] [B] -> squared errors [B] in fp32."""
    return F.mse_loss(outputs[:, 0].float(), batch["labels"].float(), reduction="none")


def build_regression_loss(config: Config, parallel: ParallelContext | None = None) -> Loss:
    return regression_loss
