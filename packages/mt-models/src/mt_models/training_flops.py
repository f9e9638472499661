"""FLOPs of training on a sample, by family (`ModelSpec.training_flops`), from the counts per token, text and image."""

from __future__ import annotations

from typing import Any

from mt_core.config.schema import Config
from mt_models.bert import flops as bert
from mt_models.biencoder import flops as biencoder
from mt_models.blocks.moe_flops import moe_flops
from mt_models.deepseek import flops as deepseek
from mt_models.flops import flops_per_token
from mt_models.hybrid import flops as hybrid
from mt_models.mamba import flops as mamba
from mt_models.retro import flops as retro
from mt_models.t5 import flops as t5
from mt_models.vision import flops as vision


def decoder_flops(config: Config) -> float:
    """Of decoders, dense or MoE."""
    length, experts = config.data.seq_length, _experts(config.model)
    return length * flops_per_token(_shape(config), length, feed_forward=experts).training


def deepseek_flops(config: Config) -> float:
    return config.data.seq_length * deepseek.flops_per_token(_shape(config), config.data.seq_length).training


def mamba_flops(config: Config) -> float:
    return config.data.seq_length * mamba.flops_per_token(_shape(config), config.data.seq_length).training


def hybrid_flops(config: Config) -> float:
    """Experts are the feed-forward of layers of their own, so that a layer of them is counted as if all were."""
    model, length = _shape(config), config.data.seq_length
    # moe_flops takes the mean over layers, dense ones included; with
    # frequency 1 the mean is that of a layer of experts.
    every_layer = model.moe and model.model_copy(update={"moe": {**model.moe, "moe_layer_freq": 1}})
    return length * hybrid.flops_per_token(model, length, experts=_experts(every_layer)).training


def bert_flops(config: Config) -> float:
    return config.data.seq_length * bert.flops_per_token(_shape(config), config.data.seq_length).training


def biencoder_flops(config: Config) -> float:
    """Scores are counted against the texts of a rank's micro-batch: their number over all ranks is not in the
    configuration, and a score is a thousandth of an encoded token."""
    negatives = getattr(config.data, "train_hard_neg", 0)
    compared = config.train.micro_batch_size * (1 + negatives)
    flops = biencoder.flops_per_question(
        _shape(config), config.data.seq_length, compared=compared, hard_negatives=negatives
    )
    return flops.training


def retro_flops(config: Config) -> float:
    return config.data.seq_length * retro.flops_per_token(_shape(config), config.data.seq_length).training


def t5_flops(config: Config) -> float:
    """A data set without data.decoder_seq_length has texts of one length."""
    length = config.data.seq_length
    return t5.flops_per_sample(_shape(config), length, getattr(config.data, "decoder_seq_length", length)).training


def vision_flops(config: Config) -> float:
    return vision.flops_per_image(_shape(config)).training


def _shape(config: Config) -> Any:
    """The model's section, which has the type of its family."""
    return config.model


def _experts(model: Any) -> float | None:
    """Of a layer's feed-forward, on average; None for a dense model."""
    return moe_flops(model) if getattr(model, "moe", None) is not None else None
