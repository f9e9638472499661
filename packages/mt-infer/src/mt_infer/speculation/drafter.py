"""What guesses tokens."""

from __future__ import annotations

from collections.abc import Sequence

from mt_infer.cache.batch import CachedBatch
from mt_infer.requests import RunningSequence
from mt_infer.sampling.sampler import Sampled

Draft = tuple[int, ...]


class Drafter:
    """Guesses the next tokens of sequences, before a forward pass or from what it computed. Subclasses do one of these.

    most: tokens of a draft. image_token: the id that stands for images in prompts, which is no word of a draft and may
    lie behind the vocabulary; None: the model reads none.
    """

    def __init__(self, most: int, image_token: int | None = None) -> None:
        self.most, self.image_token = most, image_token

    def propose(self, running: Sequence[RunningSequence]) -> None:
        """Sets `drafts` of the sequences that are ready for some; the same on every rank of the model."""

    def continued(self, batch: CachedBatch, sampled: Sequence[Sequence[Sampled]]) -> list[Draft]:
        """On the last stage: drafts that follow the sampled tokens of each chunk."""
        return [()] * len(batch.sequences)

    def usable(self, sequence: RunningSequence, length: int) -> int:
        """How many drafts can be used behind `length` tokens, which are at least one more than the prompt."""
        # Beams are not sampled: their search takes candidates. A draft continues a sampled token, so that none is made
        # behind the prompt itself.
        if sequence.beams is not None or length <= sequence.prompt_length:
            return 0
        # One place is for the token that the model samples behind the last draft.
        return max(min(self.most, sequence.capacity - length - 1), 0)

    def ready(self, running: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Sequences whose next token is the only thing to compute, with room for more.

        Those that the last step left out have drafts still.
        """
        return [one for one in running if one.waiting == 1 and not one.drafts and self.usable(one, len(one.tokens))]
