"""The section [preference] and the data of preferences."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from mt_core.config.fields import Section
from mt_core.errors import ConfigError, did_you_mean
from mt_data.datasets.sft.config import ChatTemplateKeys

PREFERENCE, PREFERENCES, REFERENCE = "preference", "preference", "reference"
"""Names of the section and the loss, of the data set, and of the source of batches."""


class PreferenceConfig(Section):
    """Training by preferences (train.loss="preference")."""

    loss: list[str] = Field(default_factory=lambda: ["sigmoid"])
    """Losses of a pair, which are added: sigmoid (DPO), robust, sigmoid_norm, hinge, ipo, exo_pair, nca_pair, bco_pair,
    sppo_hard, apo_zero, apo_down, discopop, sft, orpo, simpo, cpo."""
    loss_weights: list[float] = Field(default_factory=list)
    """Factors of the losses. Default: 1 each."""
    beta: PositiveFloat = 0.1
    """Inverse temperature: how strongly the policy is held to the reference."""
    label_smoothing: NonNegativeFloat = Field(0.0, lt=0.5)
    """Probability that a preference is the wrong way round (cDPO, robust, exo_pair)."""
    gamma: float = 0.5
    """Margin of simpo."""
    nll_weight: NonNegativeFloat = 1.0
    """Weight of the chosen answer's negative log-likelihood in cpo."""
    reference: Literal["start", "model"] = "start"
    """Where the log-probabilities of the reference come from: `start` computes those of all samples before the first
    step, by the weights that the run starts with, and keeps them in the run directory; `model` holds a second copy of
    the weights of checkpoint.load."""


class PreferenceDataConfig(ChatTemplateKeys):
    """Pairs in JSON lines, JSON arrays or Parquet: prompt, chosen and rejected, or chosen and rejected alone as whole
    conversations; texts, or lists of messages."""

    dataset_type: str = PREFERENCES
    on_error: Literal["raise", "skip"] = "raise"
    """skip: leave out records that cannot be used, with a warning that counts them and names the first."""
    on_too_long: Literal["error", "drop"] = "error"
    """A pair whose answers together are longer than seq_length is an error, or left out and counted."""
    packing: bool = True
    """Several pairs in a sample, which do not see one another; false puts one in each."""


def check_preference(config: Any) -> None:
    """The rules of [preference] that other sections are part of. Raises ConfigError."""
    if config.train.loss != PREFERENCE:
        return
    keys: PreferenceConfig = config.section(PreferenceConfig)
    _check_losses(keys)
    if config.data.dataset_type != PREFERENCES:
        raise ConfigError(
            f'train.loss="{PREFERENCE}" takes pairs, and data.dataset_type={config.data.dataset_type} gives none; '
            f'set it to "{PREFERENCES}"'
        )
    needs = needs_reference(keys.loss)
    if needs and config.train.batch_source != REFERENCE:
        raise ConfigError(
            f"preference.loss={keys.loss} compares with a reference, whose log-probabilities train.batch_source="
            f'{config.train.batch_source} does not give; set it to "{REFERENCE}"'
        )
    if not needs and config.train.batch_source == REFERENCE:
        raise ConfigError(
            f'preference.loss={keys.loss} has no reference; set train.batch_source to "dataset" (now "{REFERENCE}")'
        )
    for name in ("hidden_dropout", "attention_dropout"):
        if needs and getattr(config.model, name, None):
            raise ConfigError(
                f"model.{name}={getattr(config.model, name)}: with dropout the policy differs from the reference at "
                "the first step; set it to 0"
            )


def _check_losses(keys: PreferenceConfig) -> None:
    from mt_tune.preferences.pair_losses import PAIR_LOSSES, WITH_SMOOTHING

    unknown = [name for name in keys.loss if name not in PAIR_LOSSES]
    if unknown or not keys.loss:
        near = did_you_mean(unknown[0], PAIR_LOSSES) if unknown else ""
        raise ConfigError(f"preference.loss={keys.loss}: losses are {', '.join(PAIR_LOSSES)}{near}")
    if keys.loss_weights and len(keys.loss_weights) != len(keys.loss):
        raise ConfigError(
            f"preference.loss_weights has {len(keys.loss_weights)} factors for {len(keys.loss)} losses; give one for "
            "each"
        )
    if keys.label_smoothing and not WITH_SMOOTHING.intersection(keys.loss):
        raise ConfigError(
            f"preference.label_smoothing={keys.label_smoothing} has no effect with preference.loss={keys.loss}; set "
            f"it to 0, or take one of {', '.join(sorted(WITH_SMOOTHING))}"
        )
    if "exo_pair" in keys.loss and not keys.label_smoothing:
        raise ConfigError("preference.loss=exo_pair needs preference.label_smoothing above 0, such as 0.001")


def needs_reference(losses: list[str]) -> bool:
    from mt_tune.preferences.pair_losses import WITHOUT_REFERENCE

    return any(name not in WITHOUT_REFERENCE for name in losses)
