"""The engine: requests in, tokens out. Continuous batching over a paged cache, in the layout of its model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError, MtError
from mt_core.interfaces import Tokenizer
from mt_core.nn.batch_invariance import batch_invariant as invariant_products
from mt_core.nn.cache import Conditioning
from mt_core.parallel.context import ParallelContext
from mt_infer.adapters import AdapterSet
from mt_infer.beams import advance_beams
from mt_infer.cache.batch import Chunk
from mt_infer.cache.manager import build_caches
from mt_infer.chunk_results import ChunkResult, results_from_logits
from mt_infer.config import InferenceConfig
from mt_infer.decode_graphs import DecodeGraphs, step_recorder
from mt_infer.isolation import RANKS_OWN_ERRORS
from mt_infer.new_requests import (
    NewSequences,
    check_products,
    check_request,
    refuse_context_parallel,
    refuse_invariant_quantization,
)
from mt_infer.requests import (
    DRAFT_FAILED,
    INPUTS_FAILED,
    EngineStatistics,
    FinishReason,
    Request,
    RunningSequence,
    TokenEvent,
    append_sampled,
    failed,
)
from mt_infer.runner import ModelRunner, PlacedStages
from mt_infer.sampling.noise import new_seed
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.scheduler import Scheduler
from mt_infer.speculation.building import DraftModel, build_drafter
from mt_infer.speculation.drafter import SpeculationStatistics

log = logging.getLogger(__name__)
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
        batch_invariant: bool = False,
    ) -> None:
        # Order: the checks raise before any memory is taken; build_caches takes what inference.cache_memory_gb allows,
        # or a share of what is free then.
        self.model, self.tokenizer, self.ctx, self.options = model, tokenizer, ctx, options
        self.longest, self.is_batch_invariant = longest, batch_invariant
        refuse_context_parallel(ctx)
        if batch_invariant:
            refuse_invariant_quantization(options)
            check_products(model)
        self.runner = ModelRunner(model, ctx, placed)
        drafts = draft_model if options.speculative_method == "draft_model" else None
        draft = None if drafts is None else drafts.model
        self.manager, draft_cache = build_caches(model, draft, options, ctx, longest, batch_invariant)
        self.scheduler = Scheduler(self.manager)
        self.new_sequences = NewSequences(self.manager, tokenizer, longest, model)
        self.drafter = build_drafter(options, self.manager, self.runner, drafts, draft_cache, batch_invariant)
        self.graphs: DecodeGraphs | None = None
        recorder = step_recorder(model, options, ctx, batch_invariant)
        if recorder is not None:
            self.graphs = DecodeGraphs(self.runner, self.manager, recorder)
        self.speculation = SpeculationStatistics()
        self.adapters: AdapterSet | None = None
        self._ids = count()

    # -- requests ---------------------------------------------------------------------------------

    def add(
        self,
        tokens: Sequence[int],
        sampling: SamplingParameters | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        adapter: str | None = None,
    ) -> int:
        """The number of the new request. Raises ConfigError for one that the engine cannot serve."""
        sampling = sampling or SamplingParameters()
        if sampling.seed is None:
            sampling = replace(sampling, seed=new_seed())
        request = Request(next(self._ids), tuple(tokens), sampling, inputs or {}, adapter)
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
        # Beams share index 0, and some of n sequences may have ended: one event for each index that is still open.
        indices = dict.fromkeys(sequence.index for sequence in self._remove_request(request))
        return [TokenEvent(request, index, None, finish=FinishReason.CANCELLED) for index in indices]

    def _remove_request(self, request: int) -> list[RunningSequence]:
        # A list first: remove() changes the lists that sequences() iterates over.
        removed = [sequence for sequence in self.scheduler.sequences() if sequence.request.id == request]
        for sequence in removed:
            self.scheduler.remove(sequence)
        return removed

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
        events: list[TokenEvent] = []
        with self._evaluating():
            if self.drafter is not None:
                # Before schedule(), which counts drafted positions in the budget of the step. Collective in layouts
                # with pipeline stages or experts: every rank calls it in every step, also without sequences.
                for sequence in self.drafter.propose(self.scheduler.running):
                    events += self._end_failed(sequence, DRAFT_FAILED)
            chunks = self.scheduler.schedule()
            # An encoder in pipeline stages communicates: `chunks` is the same on all ranks of the model.
            errors = self._condition(chunks)
            events += [event for request, error in errors.items() for event in self._end_request(request, error)]
            chunks = [chunk for chunk in chunks if chunk.sequence.request.id not in errors]
            if not chunks and not fill:
                return events
            # Recurrent states cannot drop their last positions. A copy from before the pass is what roll_back restores
            # when a draft is rejected; attention needs none, since positions behind `computed` are not read.
            snapshots = [self.manager.snapshot(chunk.sequence) if chunk.drafts else None for chunk in chunks]
            results = self._sample(chunks)
        # A search decides over all its beams at once, so beams advance after every chunk of the step has its
        # candidates.
        return [*events, *self._advance_all(chunks, results, snapshots), *self._advance_beams(chunks)]

    # -- adapters -----------------------------------------------------------------------------------

    def use_adapters(self, adapters: AdapterSet) -> None:
        """Requests may name one of these from now on."""
        self.adapters = self.new_sequences.adapters = adapters

    def load_adapter(self, name: str, folder: Path) -> None:
        """Also while requests run. Raises ConfigError and CheckpointError for one that the model cannot have."""
        if self.adapters is None:
            raise ConfigError("this engine was built without adapters")
        self.adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Raises ConfigError for one that is not there, and while requests with it run."""
        if self.adapters is None or name not in self.adapters.names:
            raise ConfigError(f"there is no adapter {name}")
        if any(sequence.request.adapter == name for sequence in self.scheduler.sequences()):
            raise ConfigError(f"requests with the adapter {name} run; finish or cancel them first")
        self.adapters.unload(name)

    def weights_changed(self) -> None:
        """After an update of the model's weights: no prefix may be reused. Raises ConfigError while requests run."""
        if not self.is_idle:
            raise ConfigError(REQUESTS_RUN)
        # Blocks of ended requests keep their content under keys that do not include the weights.
        self.manager.forget_prefixes()
        if self.graphs is not None:
            self.graphs.weights_changed()

    # -- parts of a step --------------------------------------------------------------------------

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model may be one that is being trained: without dropout, and in its mode again afterwards."""
        with evaluating(self.model), invariant_products(self.is_batch_invariant):
            yield

    def _sample(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """What each chunk has come to, on every rank of the model."""
        # Without drafter, pipeline stages and batch invariance: decoding.objections refuses graphs with these.
        has_adapters = any(chunk.sequence.request.adapter is not None for chunk in chunks)
        # A graph computes what was recorded: the base alone.
        if self.graphs is not None and not has_adapters and self.graphs.serves(chunks):
            return results_from_logits(chunks, self.graphs.logits(chunks))
        # Eager: chunks of prompts, drafts, and whatever graphs do not serve.
        batch = self.runner.batch(chunks, self.manager, is_batch_invariant=self.is_batch_invariant)
        with self._using_adapters(chunks):
            logits = self.runner.logits(batch)
        # Parts of the vocabulary that training's loss sums by, where its bits are requested.
        shares = self.runner.vocab_shares if self.is_batch_invariant else ()
        # None on ranks before the last pipeline stage: they get the results from it below.
        results = [ChunkResult() for _ in chunks]
        if logits is not None:
            results = results_from_logits(chunks, logits, shares, alone=self.ctx.tp.size == 1)
        if self.drafter is not None and logits is not None:
            # On the last stage, while its hidden states are at hand (multi-token prediction).
            drafts = self.drafter.continued(batch, [result.sampled for result in results])
            for result, guesses in zip(results, drafts, strict=True):
                result.drafts = guesses or ()
                if guesses is None:
                    result.error = result.error or DRAFT_FAILED
        # One object for each chunk, in the order of `chunks`, which is the same on every rank.
        return self.runner.from_last_stage(results)

    def _using_adapters(self, chunks: Sequence[Chunk]) -> AbstractContextManager[None]:
        if self.adapters is None:
            return nullcontext()
        return self.adapters.using([(chunk.sequence.request.adapter, chunk.count) for chunk in chunks])

    def _advance_all(
        self, chunks: Sequence[Chunk], results: Sequence[ChunkResult], snapshots: Sequence[list[Tensor] | None]
    ) -> list[TokenEvent]:
        events = []
        for chunk, result, snapshot in zip(chunks, results, snapshots, strict=True):
            if chunk.drafts:
                # The last sampled token is no draft: it replaces the first wrong one, or follows the last right one.
                self.speculation.count(len(chunk.drafts), max(len(result.sampled) - 1, 0))
            events += self._advance(chunk, result, snapshot)
        return events

    def _advance(self, chunk: Chunk, result: ChunkResult, snapshot: list[Tensor] | None) -> list[TokenEvent]:
        # -1 where nothing was sampled: chunks of a prompt but the last, and beams.
        sequence, accepted = chunk.sequence, len(result.sampled) - 1
        if result.prompt:
            sequence.keep_prompt_logprobs(chunk.first_logits, result.prompt)
        # Not where the pass is rolled back below: computed() releases blocks that have left the window, for good.
        if snapshot is None or accepted == len(chunk.drafts):
            self.manager.computed(sequence, chunk.end)
        if sequence.beams is not None and result.candidates:
            sequence.beams.candidates[sequence] = result.candidates
        events = []
        for sampled in result.sampled:
            events.append(append_sampled(sequence, sampled, self.longest))
            if events[-1].finish is not None:
                self.scheduler.remove(sequence)
                return events
        # Tokens before the error are valid and have been reported.
        if result.error is not None:
            return [*events, *self._end_failed(sequence, result.error)]
        if snapshot is not None and accepted < len(chunk.drafts):
            # Recurrent states have drafts in them: what was accepted is computed again.
            self.manager.roll_back(sequence, chunk.start, snapshot)
        # A second time: keys of full blocks are made of tokens, and those of accepted drafts are in the sequence only
        # here. Rejected drafts stay in the blocks behind `computed`; the next pass overwrites them.
        elif accepted > 0:
            self.manager.computed(sequence, chunk.end + accepted)
        sequence.drafts = result.drafts
        return events

    def _end_failed(self, sequence: RunningSequence, error: str) -> list[TokenEvent]:
        """Ends a sequence that cannot be continued; beams end together, with the events of their search."""
        if sequence.beams is not None:
            sequence.beams.error = error
            return []
        self.scheduler.remove(sequence)
        return [failed(sequence.request.id, sequence.index, error)]

    def _end_request(self, request: int, error: str) -> list[TokenEvent]:
        """Ends all sequences of a request, with an event for each that has not ended; a search has one for each beam
        that it returns."""
        removed = self._remove_request(request)
        is_search = removed[0].beams is not None
        indices = (
            range(removed[0].request.sampling.n) if is_search else dict.fromkeys(sequence.index for sequence in removed)
        )
        return [failed(request, index, error) for index in indices]

    def _advance_beams(self, chunks: Sequence[Chunk]) -> list[TokenEvent]:
        groups = dict.fromkeys(chunk.sequence.beams for chunk in chunks)
        ready = [beams for beams in groups if beams is not None and (beams.is_ready or beams.error)]
        return [event for beams in ready for event in advance_beams(beams, self.scheduler)]

    def _condition(self, chunks: Sequence[Chunk]) -> dict[int, str]:
        """Encodes the inputs beside tokens of sequences that were admitted, once for each request: those that wait take
        no memory for it. Returns the requests for which that raises, with their errors."""
        # Sequences of one request share the tensors: n samples of one image encode it once, also when some were
        # preempted and lost their reference.
        known = {
            sequence.request.id: sequence.conditioning
            for sequence in self.scheduler.running
            if sequence.conditioning is not None
        }
        errors: dict[int, str] = {}
        for sequence in (chunk.sequence for chunk in chunks):
            request = sequence.request
            if not request.inputs or sequence.conditioning is not None or request.id in errors:
                continue
            if request.id not in known:
                conditioning, failed = self._encoded(request)
                if failed is not None:
                    errors[request.id] = failed
                    continue
                known[request.id] = conditioning
            sequence.conditioning = known[request.id]
        return errors

    def _encoded(self, request: Request) -> tuple[Conditioning, str | None]:
        """What generation needs of the request's inputs, or the error that some rank of the model has. Collective."""
        inputs: dict[str, Tensor] = {}
        conditioning: Conditioning = {}
        agreed = self.runner.agreed_error
        with self._failures(within_collectives=False) as failures:
            inputs = {name: tensor.to(self.ctx.device) for name, tensor in request.inputs.items()}
        # Ranks need not run out of memory alike, and encode together: all have the inputs, or none begins.
        if (failure := agreed(next(iter(failures), None))) is not None:
            return {}, failure
        with self._failures(within_collectives=self.ctx.tp.size > 1) as failures:
            conditioning = self.runner.condition(inputs)
        return conditioning, agreed(next(iter(failures), None))

    @contextmanager
    def _failures(self, *, within_collectives: bool) -> Iterator[list[str]]:
        """The message of an exception within it, if there is one. within_collectives: ranks wait for one another there,
        so that RANKS_OWN_ERRORS are raised."""
        messages: list[str] = []
        try:
            yield messages
        except Exception as error:
            if within_collectives and isinstance(error, RANKS_OWN_ERRORS):
                raise
            messages.append(str(error) if isinstance(error, MtError) else INPUTS_FAILED)
            log.exception("a request failed as its inputs were encoded")


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
