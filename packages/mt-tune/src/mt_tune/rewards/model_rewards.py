"""The registered reward that a reward model gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_tune.rewards.options import read_options
from mt_tune.rewards.reward_specs import RewardFunction


@dataclass(frozen=True)
class ModelOptions:
    """path: a run of mt tune reward, a checkpoint of one, or a folder of Hugging Face's ForSequenceClassification with
    one label. device: auto, cpu or cuda."""

    path: str
    device: str = "auto"


def build_model_reward(options: Mapping[str, Any]) -> RewardFunction:
    """The model's score of each completion with its prompt, through its chat template where they are messages.

    Raises CheckpointError and ConfigError for a path without a reward model.
    """
    keys = read_options(ModelOptions, "reward_model", options)
    from mt_tune.reward_models.scorer import RewardScorer

    scorer = RewardScorer.load(keys.path, device=keys.device)

    def judge(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        return scorer.rewards(list(zip(prompts, completions, strict=True)))

    return judge
