"""New requests: what an engine cannot serve, and the sequences of a request before their first forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_core.nn.batch_invariance import require_invariant_products
from mt_core.nn.linear import LinearModule
from mt_core.nn.model import SupportsGeneration
from mt_core.parallel.context import ParallelContext
from mt_infer.adapters import AdapterSet
from mt_infer.cache.manager import CacheManager
from mt_infer.config import InferenceConfig
from mt_infer.detokenizer import Detokenizer
from mt_infer.requests import BeamGroup, Request, RunningSequence
from mt_infer.sampling.beam_search import BeamSearch
from mt_infer.sampling.constraints import Constraints
from mt_infer.sampling.noise import sequence_seed
from mt_infer.sampling.parameters import SamplingParameters


@runtime_checkable
class RotatesByCapacity(Protocol):
    """A model whose rotary frequencies may depend on the length that a sequence may grow to."""

    def frequencies_key(self, capacity: int) -> bytes:
        """Sequences with equal keys have the same frequencies."""
        ...


class NewSequences:
    """Makes them for one engine. max_model_len: positions of a sequence. model: whose states are cached."""

    def __init__(
        self, manager: CacheManager, tokenizer: Tokenizer | None, max_model_len: int, model: object = None
    ) -> None:
        self.manager, self.tokenizer, self.max_model_len, self.model = manager, tokenizer, max_model_len, model
        self.constraints = Constraints(tokenizer)
        self.adapters: AdapterSet | None = None

    def of_request(self, request: Request) -> list[RunningSequence]:
        """Its n sequences, or the first of its beams."""
        # A search starts from one sequence, since all beams have the prompt in common; others are copies of it.
        count = 1 if request.sampling.num_beams > 1 else request.sampling.sequences
        return [self._sequence(request, index) for index in range(count)]

    def _root(self, request: Request, capacity: int) -> bytes:
        """Root of the prefix keys: equal tokens with other images, rotary frequencies or another adapter are other
        values in the cache."""
        frequencies = self.model.frequencies_key(capacity) if isinstance(self.model, RotatesByCapacity) else b""
        adapter = b"" if self.adapters is None else self.adapters.key(request.adapter)
        return content_hash(request.inputs) + frequencies + adapter

    def stop_text(self, sampling: SamplingParameters) -> Detokenizer | None:
        """What finds the stop texts of beams. Those of other sequences are found where their tokens become text."""
        if not sampling.stop:
            return None
        if self.tokenizer is None:
            raise ConfigError("stop: beams that end with a text need a tokenizer; use stop_token_ids")
        return Detokenizer(self.tokenizer, sampling.stop)

    def _sequence(self, request: Request, index: int) -> RunningSequence:
        sampling = request.sampling
        assert sampling.seed is not None
        # Scaled rotary frequencies depend on this length from the first position on, since cached keys cannot follow
        # frequencies that change.
        capacity = min(len(request.tokens) + sampling.max_tokens, self.max_model_len)
        sequence = RunningSequence(
            request,
            index,
            # n samples have a seed each, derived on every rank alike.
            sequence_seed(sampling.seed, index),
            capacity,
            self.manager.new_tables(),
            self.manager.new_keys(self._root(request, capacity)),
            list(request.tokens),
            prompt_logprobs=[None] * (len(request.tokens) - 1),
            stop_ids=self._stop_ids(sampling),
            matcher=self.constraints.matcher(sampling),
        )
        if sampling.num_beams > 1:
            sequence.beams = BeamGroup(self._search(sequence), [sequence])
        return sequence

    def _search(self, first: RunningSequence) -> BeamSearch:
        sampling = first.request.sampling
        return BeamSearch(sampling, first.stop_ids, first.capacity - first.prompt_length, self.stop_text(sampling))

    def _stop_ids(self, sampling: SamplingParameters) -> frozenset[int]:
        # The tokenizer's end of document stops a sequence unless the request ignores it.
        eod = None if self.tokenizer is None or sampling.ignore_eod else self.tokenizer.special.eod
        return frozenset(sampling.stop_token_ids) | (frozenset() if eod is None else {eod})


def content_hash(inputs: Mapping[str, Tensor]) -> bytes:
    """Hash of the tensors that a sequence is conditioned by; empty for none."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(inputs.items()):
        # Name, shape and dtype go first: equal bytes in another shape are another input.
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        # As bytes, since NumPy has no bf16.
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest() if inputs else b""


def check_request(request: Request, model: SupportsGeneration, manager: CacheManager, sequences: NewSequences) -> None:
    """Raises ConfigError for a request that the engine cannot serve."""
    _check_inputs(request, model)
    run, most = manager.longest_run(request.tokens), manager.limits.max_num_batched_tokens
    if run > most:
        raise ConfigError(
            f"the prompt has an image of {run} positions, which see one another and are computed in one pass; set "
            f"inference.max_tokens_per_step, which is {most}, to at least {run}"
        )
    if request.adapter is not None and request.adapter not in (sequences.adapters.names if sequences.adapters else ()):
        raise ConfigError(f"the model has no adapter {request.adapter}; it may have been unloaded")
    if not request.tokens:
        raise ConfigError("the prompt is empty, and the tokenizer has no id that starts a document")
    if request.sampling.num_beams > 1:
        sequences.stop_text(request.sampling)
        _check_beams(request, manager, sequences.max_model_len)
    # Compiles the constraint, or finds it compiled: an invalid one is refused before the request waits.
    sequences.constraints.matcher(request.sampling)
    # A token that nothing follows takes no position.
    # max_tokens=1 samples from the last position of the prompt alone; max_tokens=0 scores the prompt.
    asked = len(request.tokens) + (1 if request.sampling.max_tokens > 1 else 0)
    if asked > sequences.max_model_len:
        raise ConfigError(
            f"the prompt has {len(request.tokens)} tokens, and sequences have at most {sequences.max_model_len} with "
            "what is generated (inference.max_sequence_length, the model's positions); shorten the prompt"
        )


def _check_inputs(request: Request, model: SupportsGeneration) -> None:
    known = model.conditioned_by
    unknown = [name for name in request.inputs if name not in known]
    if unknown:
        raise ConfigError(
            f"the model takes no {' or '.join(unknown)} beside tokens; "
            f"it takes {' and '.join(known) if known else 'tokens only'}"
        )
    model.check_request(torch.tensor(request.tokens), request.inputs)


def _check_beams(request: Request, manager: CacheManager, max_model_len: int) -> None:
    """That all beams fit into the cache at once, in the worst case with nothing in common."""
    beams, limits = request.sampling.num_beams, manager.limits
    if beams > limits.max_requests:
        raise ConfigError(
            f"num_beams={beams} is above inference.max_requests={limits.max_requests}, the sequences that are "
            "computed at a time; raise that, or search with fewer beams"
        )
    length = min(len(request.tokens) + request.sampling.max_tokens, max_model_len)
    if not manager.holds(beams, length):
        raise ConfigError(
            f"the cache does not hold num_beams={beams} sequences of {length} positions; raise "
            "inference.cache_memory_gb, or lower num_beams or max_tokens"
        )


def refuse_context_parallel(ctx: ParallelContext) -> None:
    if ctx.cp.size > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={ctx.cp.size} divides sequences, and the cache keeps whole ones; set it "
            "to 1 to generate"
        )


def refuse_invariant_quantization(options: InferenceConfig) -> None:
    if options.quantize_weights is not None or options.cache_dtype != "auto":
        raise ConfigError(
            "numerics.batch_invariant=true gives the log-probabilities of training, which quantized numbers cannot; "
            "leave inference.quantize_weights and inference.cache_dtype out"
        )


def check_products(model: nn.Module) -> None:
    """Raises ConfigError, before the first request, where a product with a weight cannot be batch invariant here."""
    linear = [module for module in model.modules() if isinstance(module, LinearModule)]
    require_invariant_products(module.weight.detach().t() for module in linear if module.weight.ndim == 2)
