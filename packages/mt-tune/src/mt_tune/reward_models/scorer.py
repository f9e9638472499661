"""Scores of texts by a trained reward model.

scorer = RewardScorer.load("runs/reward")
scorer.scores([scorer.tokens("What is 2 + 2?", "4")])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train.trained_model import TrainedModel, load_trained_model
from mt_data.datasets.sft.chat_templates import ChatTemplate, NoChatTemplateError
from mt_data.datasets.sft.config import SFTDataConfig
from mt_data.datasets.sft.encoding import ExampleEncoder, Template, read_template
from mt_data.datasets.sft.record_formats import PROMPT_COMPLETION, RecordReader
from mt_data.preprocess.readers import Record
from mt_tune.reward_models.config import ScoreHeadConfig
from mt_tune.reward_models.model import ScoredDecoder
from mt_tune.reward_models.rows import last_scored

Messages = Sequence[Mapping[str, Any]]
BATCH = 32


class RewardScorer:
    """A model with a score head on one process."""

    def __init__(self, trained: TrainedModel) -> None:
        """Raises ConfigError for a model without a score head."""
        if not isinstance(trained.model, ScoredDecoder):
            raise ConfigError(
                f"{trained.checkpoint} has no score head (score_head.type): train a reward model with mt tune reward"
            )
        self.trained, self.model, self.padding = trained, trained.model, trained.tokenizer.special.pad
        data = trained.config.data
        keys = {key: getattr(data, key) for key in ("chat_template", "chat_template_file") if hasattr(data, key)}
        settings = SFTDataConfig(**keys, train_on="last_answer")
        template: Template = read_template(settings, trained.tokenizer)
        self._encoder = ExampleEncoder(settings, template, trained.tokenizer)
        self.template = template if isinstance(template, ChatTemplate) else None
        assert isinstance(template, ChatTemplate | NoChatTemplateError)

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto", host: PluginHost | None = None) -> RewardScorer:
        """Scorer of a run, a checkpoint of any format, or a folder of Hugging Face. Raises CheckpointError and
        ConfigError."""
        return cls(load_trained_model(path, host or load_plugins(), device=device))

    def tokens(self, prompt: str | Messages, answer: str | Messages) -> list[int]:
        """Ids of a prompt with its answer, as training encodes them: both texts, or both messages (an answer to
        messages may be a text)."""
        if not isinstance(prompt, str) and isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        record = Record({"prompt": prompt, "completion": answer}, "the text", 1)
        (encoded,) = self._encoder.encoded(RecordReader(PROMPT_COMPLETION).example(record))
        return encoded.tokens.tolist()

    def require_room(self, text: Sequence[int]) -> None:
        """Raises ConfigError for more tokens than the model has positions."""
        if len(text) > self.longest:
            raise ConfigError(
                f"the prompt has {len(text)} tokens with its answer, and {self.trained.checkpoint} takes {self.longest}"
            )

    @property
    def longest(self) -> int:
        """Tokens of a text."""
        return self.model.max_sequence_length or self.trained.config.data.seq_length

    @property
    def tokenizer(self) -> Tokenizer:
        return self.trained.tokenizer

    def pair_tokens(self, prompt: str, answer: str) -> list[int]:
        """Ids of two texts: through the chat template, if the model was trained with one, as a user's message and its
        answer. Raises ConfigError for more than the model takes."""
        ids = self.tokens(prompt if self.template is None else [{"role": "user", "content": prompt}], answer)
        self.require_room(ids)
        return ids

    def pair_scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """The rewards of pairs of a prompt and an answer, of their ids."""
        return [score for (score,) in self.scores(texts)]

    @torch.inference_mode()
    def scores(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The scores of each text (one of a reward model), of its ids."""
        scores: list[list[float]] = []
        for start in range(0, len(texts), BATCH):
            scores += self._batch(texts[start : start + BATCH]).tolist()
        return scores

    def rewards(self, answers: Sequence[tuple[str | Messages, str | Messages]]) -> list[float]:
        """The reward of each pair of a prompt and an answer."""
        texts = [self.tokens(prompt, answer) for prompt, answer in answers]
        for text in texts:
            self.require_room(text)
        return self.pair_scores(texts)

    def _batch(self, texts: Sequence[Sequence[int]]) -> Tensor:
        device = self.trained.ctx.device
        # Behind the token that is scored nothing matters.
        ends = [last_scored(np.array(text, np.int32), self.padding) + 1 for text in texts]
        tokens = torch.zeros(len(texts), max(ends), dtype=torch.int64)
        for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
            tokens[row, :end] = torch.tensor(list(text[:end]))
        return self.model.scores(tokens.to(device), torch.tensor(ends, device=device))


def build_pair_scorer(trained: TrainedModel) -> RewardScorer | None:
    """See `mt_infer.pair_scorers.BuildPairScorer`: of a reward model of whole answers."""
    is_reward_model = isinstance(trained.model, ScoredDecoder) and trained.config.section(ScoreHeadConfig).outputs == 1
    return RewardScorer(trained) if is_reward_model else None
