"""The section [preference] and the data of preferences."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from mt_core.config.fields import Section
from mt_core.errors import ConfigError, did_you_mean
from mt_data.datasets.sft.config import ChatTemplateKeys
from mt_tune.adapters.config import AdapterConfig

PREFERENCE, PREFERENCES, REFERENCE = "preference", "preference", "reference"
"""Names of the section and the loss, of the data set, and of the source of batches."""
UNPAIRED, UNPAIRED_REFERENCE = "unpaired_preference", "unpaired_reference"
"""Names of the loss and the data set of single answers, and of their source of batches."""


class PreferenceConfig(Section):
    """Training by preferences (train.loss="preference", or "unpaired_preference")."""

    loss: list[str] = Field(default_factory=lambda: ["sigmoid"])
    """Losses of a pair, which are added: sigmoid (DPO), robust, sigmoid_norm, hinge, ipo, exo_pair, nca_pair, bco_pair,
    sppo_hard, apo_zero, apo_down, discopop, aot, aot_unpaired, sft, orpo, simpo, cpo."""
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
    reference: Literal["start", "model", "adapter_off"] = "start"
    """Where the log-probabilities of the reference come from: `start` computes those of all samples before the first
    step, by the weights that the run starts with, and keeps them in the run directory; `model` holds a second copy of
    the weights of checkpoint.load; `adapter_off` computes those of each batch by the model without its adapter."""
    unpaired_loss: Literal["kto", "apo_zero_unpaired", "bco"] = "kto"
    """Loss of a single answer (train.loss="unpaired_preference")."""
    desirable_weight: PositiveFloat = 1.0
    """Factor of the loss of desirable answers (unpaired)."""
    undesirable_weight: PositiveFloat = 1.0
    """Factor of the loss of undesirable answers (unpaired). The KTO paper has the desirable answers' weight times their
    number within 1 to 4/3 times that of the undesirable ones."""


class AnswerDataConfig(ChatTemplateKeys):
    """What data sets of preferences share."""

    on_error: Literal["raise", "skip"] = "raise"
    """skip: leave out records that cannot be used, with a warning that counts them and names the first."""
    on_too_long: Literal["error", "drop"] = "error"
    """A record that takes more positions than seq_length (a pair: both answers together) is an error, or left out and
    counted."""
    packing: bool = True
    """Several records in a sample, whose answers do not see one another; false puts one in each."""


class PreferenceDataConfig(AnswerDataConfig):
    """Pairs in JSON lines, JSON arrays or Parquet: prompt, chosen and rejected, or chosen and rejected alone as whole
    conversations; texts, or lists of messages."""

    dataset_type: str = PREFERENCES


class UnpairedDataConfig(AnswerDataConfig):
    """Single answers in JSON lines, JSON arrays or Parquet: prompt, completion and label (true: desirable)."""

    dataset_type: str = UNPAIRED


def check_preference(config: Any) -> None:
    """The rules of [preference] that other sections are part of. Raises ConfigError."""
    keys: PreferenceConfig = config.section(PreferenceConfig)
    if config.train.loss == PREFERENCE:
        _check_losses(keys)
        _check_data(config, PREFERENCES, "pairs")
        _check_source(config, REFERENCE, f"preference.loss={keys.loss}", needed=needs_reference(keys.loss))
        needs = needs_reference(keys.loss)
    elif config.train.loss == UNPAIRED:
        _check_data(config, UNPAIRED, "single answers")
        _check_source(config, UNPAIRED_REFERENCE, f"train.loss={UNPAIRED}", needed=True)
        needs = True
    else:
        return
    if not needs:
        return
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(config.model, name, None):
            raise ConfigError(
                f"model.{name}={getattr(config.model, name)}: with dropout the policy differs from the reference at "
                "the first step; set it to 0"
            )
    if keys.reference == "adapter_off":
        check_adapter_off(config.section(AdapterConfig))


def _check_data(config: Any, dataset_type: str, what: str) -> None:
    if config.data.dataset_type != dataset_type:
        raise ConfigError(
            f'train.loss="{config.train.loss}" takes {what}, and data.dataset_type={config.data.dataset_type} gives '
            f'none; set it to "{dataset_type}"'
        )


def _check_source(config: Any, source: str, what: str, *, needed: bool) -> None:
    if needed and config.train.batch_source != source:
        raise ConfigError(
            f"{what} compares with a reference, whose log-probabilities train.batch_source="
            f'{config.train.batch_source} does not give; set it to "{source}"'
        )
    if not needed and config.train.batch_source == source:
        raise ConfigError(f'{what} has no reference; set train.batch_source to "dataset" (now "{source}")')


def check_adapter_off(adapter: AdapterConfig) -> None:
    """Raises ConfigError where the model without its adapter is not what the run starts from."""
    asked = 'preference.reference="adapter_off"'
    other = 'set preference.reference to "start" or "model"'
    if not adapter.is_on:
        raise ConfigError(
            f"{asked} takes the model without its adapter, and there is none; set adapter.type, or {other}"
        )
    if adapter.load is not None:
        raise ConfigError(
            f"{asked}: the run starts from the adapter {adapter.load}, without which the model is another one; merge "
            f"it first (mt ckpt merge-adapter), or {other}"
        )
    if adapter.modules_to_save:
        raise ConfigError(
            f"{asked}: adapter.modules_to_save={adapter.modules_to_save} are trained in place, so that the model "
            f"without its adapter is not the one at the start; leave them out, or {other}"
        )
    if adapter.init in ("pissa", "olora"):
        raise ConfigError(
            f"{asked}: adapter.init={adapter.init} takes a part of the weights out of the base, so that the model "
            f'without its adapter is not the one at the start; set adapter.init to "kaiming" or "gaussian", or {other}'
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
