"""Drafts by a model's own layers of multi-token prediction (DeepSeek-V3, 2024).

Depth d predicts behind position i the token i + d + 1, from the state of depth d - 1 and the token i + d. The depths
run after each forward pass, over its positions. At the last ones depths above the first read drafts; these positions
are computed again after the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mt_core.nn.model import PredictsAhead
from mt_infer.cache.batch import CachedBatch, Chunk
from mt_infer.cache.manager import CacheManager
from mt_infer.requests import RunningSequence
from mt_infer.runner import ModelRunner, gather_vocab
from mt_infer.sampling.rows import SamplingRow
from mt_infer.sampling.sampler import Sampled
from mt_infer.speculation.drafter import Draft, Drafter, choose_drafts


@dataclass(frozen=True)
class _Tail:
    """The model's hidden states [k, C] of the positions before `end`."""

    end: int
    hidden: Tensor


@dataclass
class _Span:
    """Positions start ... end - 1 of a sequence: hidden [end - start, C], and all tokens so far. wanted: drafts."""

    sequence: RunningSequence
    start: int
    end: int
    hidden: Tensor
    tokens: list[int]
    wanted: int
    drafts: Draft = ()
    has_failed: bool = False
    """Whether choosing one of its drafts raised."""

    @property
    def new_tokens(self) -> list[int]:
        """Those that this pass sampled."""
        return self.tokens[len(self.sequence.tokens) :]

    def ahead(self, by: int) -> list[int]:
        """The tokens `by` places behind the positions; 0 where a prompt's are not in the sequence yet."""
        known = [*self.tokens, *self.drafts]
        return [known[place] if place < len(known) else 0 for place in range(self.start + by, self.end + by)]


# Example, 2 depths, after the pass over positions 5 and 6, which sampled token t7:
#   depth 0 at 5 6 reads t6 t7 and predicts t8 from position 6
#   depth 1 at 5 6 reads t7 t8 and predicts t9 from position 6; t8 is a draft
# If t8 turns out another, what depth 1 has at position 6 is of a wrong token: position 6 is in the tail, and is
# computed again with the next pass.
class MultiTokenDrafter(Drafter):
    """most: at most the depths that the model has."""

    def __init__(self, most: int, model: PredictsAhead, runner: ModelRunner, manager: CacheManager) -> None:
        # A depth predicts one token.
        super().__init__(min(most, model.prediction_depths))
        self.model, self.runner, self.manager = model, runner, manager
        # By identity of the sequence; an entry goes with it.
        self._tails: WeakKeyDictionary[RunningSequence, _Tail] = WeakKeyDictionary()

    def continued(self, batch: CachedBatch, sampled: Sequence[Sequence[Sampled]]) -> list[Draft | None]:
        assert batch.hidden is not None
        # [count, C] for each chunk, without filler. C: the hidden size, or that of all residual streams.
        hidden = batch.hidden[0, : batch.count].split([chunk.count for chunk in batch.sequences])
        spans = [
            self._span(chunk, states, [token.token for token in drawn])
            for chunk, states, drawn in zip(batch.sequences, hidden, sampled, strict=True)
        ]
        # The depths keep keys and values at the same positions as the model's layers, in the same tables of blocks.
        passes = CachedBatch(
            [Chunk(span.sequence, span.start, span.end - span.start, 1) for span in spans],
            self.manager,
            batch.device,
            is_batch_invariant=batch.is_batch_invariant,
        )
        # Without a sequence, a position of filler: ranks that share experts compute together.
        state = torch.cat([span.hidden for span in spans])[None] if spans else batch.hidden[:, :1]
        for depth in range(self.most):
            # [T]
            ahead = [token for span in spans for token in span.ahead(depth + 1)]
            tokens = torch.tensor([ahead or [0]], device=batch.device)
            state = self.model.predict_ahead(depth, state, tokens, passes)  # [1, T, C]
            # Nothing to draft, but the layer's experts have been run with the other ranks.
            if not spans:
                continue
            logits = self.model.logits_ahead(depth, state[:, passes.logit_rows])
            self._draft(spans, gather_vocab(logits, self.runner.ctx).logits[0])
        return [None if span.has_failed else span.drafts for span in spans]

    def _span(self, chunk: Chunk, hidden: Tensor, sampled: list[int]) -> _Span:
        """The chunk's positions without rejected drafts, behind those of its tail."""
        sequence, end = chunk.sequence, chunk.end + max(len(sampled) - 1, 0)
        # Rejected drafts have hidden states of wrong tokens.
        start, hidden = chunk.start, hidden[: end - chunk.start]
        tail = self._tails.get(sequence)
        # Else the sequence was preempted, or began with a shared prefix: there are no states to repeat.
        if tail is not None and tail.end == chunk.start:
            start, hidden = start - len(tail.hidden), torch.cat((tail.hidden, hidden))
        if self.most > 1:
            # The last most - 1 positions: those at which a depth above the first reads a draft.
            self._tails[sequence] = _Tail(end, hidden[len(hidden) - min(self.most - 1, len(hidden)) :])
        tokens = [*sequence.tokens, *sampled]
        wanted = self.usable(sequence, len(tokens)) if sampled else 0
        return _Span(sequence, start, end, hidden, tokens, wanted)

    def _draft(self, spans: Sequence[_Span], logits: Tensor) -> None:
        """logits [number of spans, vocab]: one more token for each span that is to have more."""
        # Chunks that sampled nothing get no drafts.
        numbers = [n for n, span in enumerate(spans) if len(span.drafts) < span.wanted and not span.has_failed]
        rows = [SamplingRow(spans[n].sequence, (*spans[n].new_tokens, *spans[n].drafts)) for n in numbers]
        chosen = choose_drafts(logits[numbers].float(), rows, alone=self.runner.ctx.tp.size == 1)
        for number, token in zip(numbers, chosen, strict=True):
            spans[number].has_failed = token is None
            spans[number].drafts = spans[number].drafts if token is None else (*spans[number].drafts, token)
