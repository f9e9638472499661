"""The engine: requests in, tokens out. Continuous batching over a paged cache, in the layout of its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor, nn

from mt_core.config.schema import InferenceConfig
from mt_core.errors import ConfigError
from mt_core.nn.batch_invariance import batch_invariant
from mt_core.parallel.context import ParallelContext
from mt_core.specs import Tokenizer
from mt_core.train.cuda_graphs.capture import CudaRecorder
from mt_infer.beams import advance_beams
from mt_infer.cache.batch import Chunk
from mt_infer.cache.building import build_caches
from mt_infer.chunk_results import ChunkResult, results_from_logits
from mt_infer.decoding.graphs import DecodeGraphs
from mt_infer.decoding.objections import uses_graphs
from mt_infer.new_sequences import NewSequences
from mt_infer.request_checks import check_request, refuse_context_parallel, refuse_invariant_quantization
from mt_infer.requests import FinishReason, Request, RunningSequence, TokenEvent
from mt_infer.runner import ModelRunner, PlacedStages
from mt_infer.sampling.noise import new_seed
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.scheduler import Scheduler
from mt_infer.speculation.building import DraftModel, build_drafter
from mt_infer.speculation.verification import SpeculationStatistics
from mt_infer.statistics import EngineStatistics
from mt_infer.token_events import append_sampled, failed

REQUESTS_RUN = "weights cannot change while requests run; finish or cancel them first"


class InferenceEngine:
    """Generates with one model. `add` takes requests, `step` runs one forward pass and returns what came of it.

    In a layout of several ranks each has an engine, and all make the same calls in the same order (see
    `mt_infer.lockstep`); tokens are sampled by the ranks of the last stage and sent to the others.

    longest: positions of a sequence, prompt included. Raises ConfigError for a model that does not generate, or a cache
    that does not hold one sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer | None,
        ctx: ParallelContext,
        options: InferenceConfig,
        *,
        longest: int,
        placed: PlacedStages | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.model, self.tokenizer, self.ctx, self.options = model, tokenizer, ctx, options
        self.longest = longest
        refuse_context_parallel(ctx)
        refuse_invariant_quantization(options)
        self.runner = ModelRunner(model, ctx, placed)
        drafts = draft_model if options.speculative_method == "draft_model" else None
        draft = None if drafts is None else drafts.model
        self.manager, draft_cache = build_caches(model, draft, options, ctx, longest)
        self.scheduler = Scheduler(self.manager)
        self.new_sequences = NewSequences(self.manager, tokenizer, longest)
        self.drafter = build_drafter(options, self.manager, self.runner, drafts, draft_cache)
        self.graphs: DecodeGraphs | None = None
        if uses_graphs(model, options, ctx):
            self.graphs = DecodeGraphs(self.runner, self.manager, CudaRecorder())
        self.speculation = SpeculationStatistics()
        self._ids = count()

    # -- requests ---------------------------------------------------------------------------------

    def add(
        self,
        tokens: Sequence[int],
        sampling: SamplingParameters | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> int:
        """The number of the new request. Raises ConfigError for one that the engine cannot serve."""
        sampling = sampling or SamplingParameters()
        if sampling.seed is None:
            sampling = replace(sampling, seed=new_seed())
        request = Request(next(self._ids), tuple(tokens), sampling, inputs or {})
        self.check(request)
        self.add_request(request)
        return request.id

    def add_request(self, request: Request) -> None:
        """A request with a seed and a number of its own, the same on all ranks of the model."""
        assert request.sampling.seed is not None
        self.scheduler.add(self.new_sequences.of_request(request))

    def check(self, request: Request) -> None:
        """Raises ConfigError for a request that the engine cannot serve."""
        check_request(request, self.runner.model, self.manager, self.new_sequences)

    def cancel(self, request: int) -> list[TokenEvent]:
        """Ends a request and frees its memory."""
        cancelled = [sequence for sequence in self.scheduler.sequences() if sequence.request.id == request]
        for sequence in cancelled:
            self.scheduler.remove(sequence)
        indices = dict.fromkeys(one.index for one in cancelled)
        return [TokenEvent(request, index, None, finish=FinishReason.CANCELLED) for index in indices]

    def finish(self, request: int, index: int) -> None:
        """Ends one sequence of a request: its text has come to a stop text."""
        for sequence in self.scheduler.sequences():
            if (sequence.request.id, sequence.index) == (request, index):
                self.scheduler.remove(sequence)
                return

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    @property
    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            self.scheduler.preemptions,
            self.manager.used_blocks,
            sum(pool.count for pool in self.manager.pools),
            self.scheduler.queried_tokens,
            self.scheduler.cached_tokens,
            self.speculation.drafted,
            self.speculation.accepted,
        )

    @torch.inference_mode()
    def step(self, *, fill: bool = False) -> list[TokenEvent]:
        """One forward pass over the sequences that are next. fill: also without any, for the experts of other ranks."""
        with self._evaluating():
            if self.drafter is not None:
                self.drafter.propose(self.scheduler.running)
            chunks = self.scheduler.schedule()
            if not chunks and not fill:
                return []
            self._condition(chunks)
            snapshots = [self.manager.snapshot(chunk.sequence) if chunk.drafts else None for chunk in chunks]
            found = self._sample(chunks)
        return [*self._advance_all(chunks, found, snapshots), *self._advance_beams(chunks)]

    def weights_changed(self) -> None:
        """After an update of the model's weights: no prefix may be reused. Raises ConfigError while requests run."""
        if not self.is_idle:
            raise ConfigError(REQUESTS_RUN)
        self.manager.forget_prefixes()
        if self.graphs is not None:
            self.graphs.weights_changed()

    # -- parts of a step --------------------------------------------------------------------------

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model may be one that is being trained: without dropout, and in its mode again afterwards."""
        with evaluating(self.model), batch_invariant(self.options.batch_invariant):
            yield

    def _sample(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """What each chunk has come to, on every rank of the model."""
        if self.graphs is not None and self.graphs.serves(chunks):
            return results_from_logits(chunks, self.graphs.logits(chunks))
        batch = self.runner.batch(chunks, self.manager, is_batch_invariant=self.options.batch_invariant)
        logits = self.runner.logits(batch)
        # Parts of the vocabulary that training's loss sums by, where its bits are wanted.
        shares = self.runner.vocab_shares if self.options.batch_invariant else ()
        found = [ChunkResult() for _ in chunks] if logits is None else results_from_logits(chunks, logits, shares)
        if self.drafter is not None and logits is not None:
            drafts = self.drafter.continued(batch, [one.sampled for one in found])
            for one, guesses in zip(found, drafts, strict=True):
                one.drafts = guesses
        return self.runner.from_last_stage(found)

    def _advance_all(
        self, chunks: Sequence[Chunk], found: Sequence[ChunkResult], snapshots: Sequence[list[Tensor] | None]
    ) -> list[TokenEvent]:
        events = []
        for chunk, own, snapshot in zip(chunks, found, snapshots, strict=True):
            if chunk.drafts:
                self.speculation.count(len(chunk.drafts), max(len(own.sampled) - 1, 0))
            events += self._advance(chunk, own, snapshot)
        return events

    def _advance(self, chunk: Chunk, found: ChunkResult, snapshot: list[Tensor] | None) -> list[TokenEvent]:
        sequence, accepted = chunk.sequence, len(found.sampled) - 1
        if found.prompt:
            sequence.keep_prompt_logprobs(chunk.first_logits, found.prompt)
        if snapshot is None or accepted == len(chunk.drafts):
            self.manager.computed(sequence, chunk.end)
        if sequence.beams is not None and found.candidates:
            sequence.beams.candidates[sequence] = found.candidates
        events = []
        for sampled in found.sampled:
            events.append(append_sampled(sequence, sampled, self.longest))
            if events[-1].finish is not None:
                self.scheduler.remove(sequence)
                return events
        if found.error is not None:
            return [*events, *self._end_failed(sequence, found.error)]
        if snapshot is not None and accepted < len(chunk.drafts):
            # Recurrent states have drafts in them: what was accepted is computed again.
            self.manager.roll_back(sequence, chunk.start, snapshot)
        elif accepted > 0:
            self.manager.computed(sequence, chunk.end + accepted)
        sequence.drafts = found.drafts
        return events

    def _end_failed(self, sequence: RunningSequence, error: str) -> list[TokenEvent]:
        """Ends a sequence that cannot be continued; beams end together, with the events of their search."""
        if sequence.beams is not None:
            sequence.beams.error = error
            return []
        self.scheduler.remove(sequence)
        return [failed(sequence.request.id, sequence.index, error)]

    def _advance_beams(self, chunks: Sequence[Chunk]) -> list[TokenEvent]:
        groups = dict.fromkeys(chunk.sequence.beams for chunk in chunks)
        ready = [beams for beams in groups if beams is not None and (beams.is_ready or beams.error)]
        return [event for beams in ready for event in advance_beams(beams, self.scheduler)]

    def _condition(self, chunks: Sequence[Chunk]) -> None:
        """Of sequences that were admitted what the model makes of their requests' inputs, once for each request: those
        that wait take no memory for it."""
        found = {one.request.id: one.conditioning for one in self.scheduler.running if one.conditioning is not None}
        for sequence in (chunk.sequence for chunk in chunks):
            request = sequence.request
            if request.inputs and sequence.conditioning is None:
                if request.id not in found:
                    inputs = {name: tensor.to(self.ctx.device) for name, tensor in request.inputs.items()}
                    found[request.id] = self.runner.condition(inputs)
                sequence.conditioning = found[request.id]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, and then as it was. A model that is in it already is left alone: there are many modules."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
