"""Drafts by a small model with a cache of its own (Leviathan et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mt_core.parallel.reductions import all_reduce_
from mt_infer.blocks import OutOfBlocksError
from mt_infer.cache.batch import Chunk
from mt_infer.cache.manager import CacheManager
from mt_infer.requests import Request, RunningSequence
from mt_infer.runner import ModelRunner
from mt_infer.sampling.rows import SamplingRow
from mt_infer.speculation.drafter import Drafter, choose_drafts


@dataclass
class _Drafted:
    """A sequence and its copy, which shares its tokens but has memory in the small model's cache."""

    sequence: RunningSequence
    copy: RunningSequence
    wanted: int
    tokens: tuple[int, ...] = ()
    has_failed: bool = False
    """Whether choosing one of its tokens raised."""


# One step, for sequences that are ready (all tokens but the last are in the large model's cache):
#   catch up   the small model computes the tokens that it has not seen yet, and drafts the first token
#   extend     most - 1 times: one more token, computed behind the drafts so far
#   roll back  drafts leave the small model's cache: those that are accepted are computed again next time
# All of it is batched over sequences.
class ModelDrafter(Drafter):
    """Samples with the uniform numbers that the model will use: where distributions agree, so do tokens.

    Ranks that share experts make the same number of forward passes, over a position of filler where they have nothing
    to draft.
    """

    def __init__(
        self,
        most: int,
        runner: ModelRunner,
        manager: CacheManager,
        *,
        is_batch_invariant: bool,
        image_token: int | None = None,
    ) -> None:
        super().__init__(most, image_token)
        self.runner, self.manager, self.is_batch_invariant = runner, manager, is_batch_invariant
        self._copies: dict[RunningSequence, RunningSequence] = {}

    def propose(self, running: Sequence[RunningSequence]) -> list[RunningSequence]:
        # Sequences that ended, or were preempted: the copy's memory is free for others.
        for gone in [sequence for sequence in self._copies if sequence not in running]:
            self.manager.release(self._copies.pop(gone))
        drafted = [
            _Drafted(draft, self._copy(draft), self.usable(draft, len(draft.tokens))) for draft in self.ready(running)
        ]
        # Those without room in the small model's cache are not drafted for in this step.
        drafted = [draft for draft in drafted if self._reserve(draft)]
        self._catch_up(drafted)
        # Of recurrent small models, after the true tokens and before any draft.
        snapshots = [self.manager.snapshot(draft.copy) for draft in drafted]
        # The number of turns is the same on every rank, since each may have a collective.
        for count in range(1, self.most):
            self._extend([draft for draft in drafted if draft.wanted > count and not draft.has_failed])
        for draft, snapshot in zip(drafted, snapshots, strict=True):
            draft.sequence.drafts = draft.tokens
            # Keys and values of drafts are overwritten; recurrent states are restored.
            self.manager.roll_back(draft.copy, len(draft.sequence.tokens), snapshot)
        return [draft.sequence for draft in drafted if draft.has_failed]

    def ready(self, running: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Without prompts with images, which the small model cannot read."""
        return [sequence for sequence in super().ready(running) if not self._has_images(sequence.request)]

    def _has_images(self, request: Request) -> bool:
        return bool(request.inputs) and self.image_token in request.tokens

    def _copy(self, sequence: RunningSequence) -> RunningSequence:
        if sequence not in self._copies:
            tables, keys = self.manager.new_tables(), self.manager.new_keys(b"")
            # The list `tokens` is shared: the copy has the large model's tokens as soon as they are sampled. Keys have
            # no root of inputs, as nothing is shared among copies.
            self._copies[sequence] = replace(sequence, tables=tables, keys=keys, computed=0, slot=None, memory={})
        return self._copies[sequence]

    def _reserve(self, draft: _Drafted) -> bool:
        """Whether there is memory for the sequence and its draft."""
        try:
            # New, or released when there was no room.
            if not draft.copy.computed:
                self.manager.admit(draft.copy)
            self.manager.reserve(draft.copy, len(draft.copy.tokens) + draft.wanted)
        except OutOfBlocksError:
            # All of it: the copy is computed anew when there is room.
            self.manager.release(draft.copy)
            return False
        return True

    def _catch_up(self, drafted: Sequence[_Drafted]) -> None:
        """Computes the tokens that are new since the last time, and drafts one."""
        behind = list(drafted)
        while self._on_any_rank(behind):
            budget, chunks = self.manager.limits.max_num_batched_tokens, []
            for draft in behind:
                # A prompt takes several turns, max_tokens_per_step positions each.
                count = min(draft.copy.num_uncomputed_tokens, budget)
                if count:
                    # Logits behind the last known token only.
                    ends = int(count == draft.copy.num_uncomputed_tokens)
                    chunks.append((draft, Chunk(draft.copy, draft.copy.computed, count, ends)))
                    budget -= count
            self._run(chunks)
            behind = [draft for draft in behind if draft.copy.num_uncomputed_tokens]

    def _extend(self, drafted: Sequence[_Drafted]) -> None:
        """Drafts one more token of each."""
        # The last draft as the chunk's only position: it is not among the sequence's tokens.
        chunks = [(draft, Chunk(draft.copy, draft.copy.computed, 1, 1, draft.tokens[-1:])) for draft in drafted]
        if self._on_any_rank(chunks):
            self._run(chunks)

    def _on_any_rank(self, work: Sequence[object]) -> bool:
        """Whether a rank that shares experts with this one has some work."""
        ep = self.runner.ctx.ep
        if ep.size == 1:
            return bool(work)
        # The all-to-all of experts needs every rank of ep, so that all of them go on while one has work.
        count = torch.tensor(len(work), device=self.runner.ctx.device)
        all_reduce_(count, ep, "max")
        return bool(count)

    @torch.inference_mode()
    def _run(self, chunks: Sequence[tuple[_Drafted, Chunk]]) -> None:
        computed = [chunk for _, chunk in chunks]
        batch = self.runner.batch(computed, self.manager, is_batch_invariant=self.is_batch_invariant)
        logits = self.runner.logits(batch)
        ending = [draft for draft, chunk in chunks if chunk.logits]
        # The large model's sequence: its seed, index and parameters, so that the same random number is drawn.
        rows = [SamplingRow(draft.sequence, draft.tokens) for draft in ending]
        # Every rank continues from the same drafts.
        chosen = [] if logits is None else choose_drafts(logits, rows, alone=self.runner.ctx.tp.size == 1)
        for draft, token in zip(ending, self.runner.from_last_stage(chosen), strict=True):
            draft.has_failed = token is None
            draft.tokens = draft.tokens if token is None else (*draft.tokens, token)
        for draft, chunk in chunks:
            draft.copy.computed = chunk.start + chunk.count
