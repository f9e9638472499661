"""The section [score_head] and the data of reward models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat

from mt_core.config.fields import PositiveInt, Section
from mt_core.errors import ConfigError
from mt_tune.preferences.config import AnswerDataConfig

REWARD, PROCESS_REWARD = "reward", "process_reward"
"""Names of losses and of their data sets."""
HeadType = Literal["none", "sequence", "token"]


class ScoreHeadConfig(Section):
    """Scores in place of the LM head of a causal decoder (reward models)."""

    type: HeadType = "none"
    """sequence: scores of a text, read at its last token, as Hugging Face's ForSequenceClassification. token: scores at
    tokens, as ForTokenClassification. none: the model has its LM head."""
    num_labels: PositiveInt | None = None
    """Scores of a text or a token. Default: 1 of sequences (a reward), 2 of tokens (wrong, right)."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of (r_chosen + r_rejected)^2 in the loss of pairs, which holds rewards around 0; 0.01 is usual."""

    @property
    def is_on(self) -> bool:
        return self.type != "none"

    @property
    def outputs(self) -> int:
        return self.num_labels or (2 if self.type == "token" else 1)


class RewardDataConfig(AnswerDataConfig):
    """Pairs in the forms of the data set `preference`; both whole texts of a pair are scored."""

    dataset_type: str = REWARD


class ProcessRewardDataConfig(AnswerDataConfig):
    """Answers in steps: prompt, completions (the steps) and labels (true or false of each), in TRL's form."""

    dataset_type: str = PROCESS_REWARD
    step_separator: str = Field("\n", min_length=1)
    """Text behind each step, at whose last token the step is judged."""
    last_step_only: bool = False
    """Train on the label of the last step of each answer alone."""


def has_score_head(config: Any) -> bool:
    return config.section(ScoreHeadConfig).is_on


WANTED = {REWARD: ("sequence", 1), PROCESS_REWARD: ("token", 2)}
"""Loss -> the type and the outputs of the head that it takes."""


def check_score_head(config: Any) -> None:
    """The rules of [score_head] that other sections are part of. Raises ConfigError."""
    head, loss = config.section(ScoreHeadConfig), config.train.loss
    if loss not in WANTED:
        if head.is_on and loss in ("auto", "cross_entropy"):
            raise ConfigError(
                f"score_head.type={head.type} takes the place of the LM head, and train.loss={loss} predicts words; "
                f'set train.loss to {" or ".join(WANTED)}, or score_head.type to "none"'
            )
        return
    kind, outputs = WANTED[loss]
    if (head.type, head.outputs) != (kind, outputs):
        raise ConfigError(
            f'train.loss="{loss}" takes score_head.type="{kind}" with score_head.num_labels={outputs}, and they are '
            f"{head.type} and {head.outputs}"
        )
    if config.data.dataset_type != loss:
        raise ConfigError(
            f'train.loss="{loss}" takes the data of data.dataset_type="{loss}", and it is {config.data.dataset_type}'
        )
    if head.center_rewards_coefficient and loss != REWARD:
        raise ConfigError(f'score_head.center_rewards_coefficient is of train.loss="{REWARD}"; set it to 0')
