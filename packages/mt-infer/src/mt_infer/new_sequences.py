"""The sequences of a request, before their first forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.specs import Tokenizer
from mt_infer.cache.manager import CacheManager
from mt_infer.detokenizer import Detokenizer
from mt_infer.requests import BeamGroup, Request, RunningSequence
from mt_infer.sampling.beam_search import BeamSearch
from mt_infer.sampling.constraints import Constraints
from mt_infer.sampling.noise import sequence_seed
from mt_infer.sampling.parameters import SamplingParameters


class NewSequences:
    """Makes them for one engine. longest: positions of a sequence."""

    def __init__(self, manager: CacheManager, tokenizer: Tokenizer | None, longest: int) -> None:
        self.manager, self.tokenizer, self.longest = manager, tokenizer, longest
        self.constraints = Constraints(tokenizer)

    def of_request(self, request: Request) -> list[RunningSequence]:
        """Its n sequences, or the first of its beams."""
        # A search starts from one sequence, since all beams have the prompt in common; others are copies of it.
        count = 1 if request.sampling.num_beams > 1 else request.sampling.sequences
        return [self._sequence(request, index) for index in range(count)]

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
        sequence = RunningSequence(
            request,
            index,
            # n samples have a seed each, derived on every rank alike.
            sequence_seed(sampling.seed, index),
            # capacity: dynamic rotary scaling takes this length from the first position on, since cached keys cannot
            # follow a changing base.
            min(len(request.tokens) + sampling.max_tokens, self.longest),
            self.manager.new_tables(),
            # The root of the prefix keys: equal tokens with other images are other values in the cache.
            self.manager.new_keys(content_hash(request.inputs)),
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
    """Of the tensors that a sequence is conditioned by; empty for none."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(inputs.items()):
        # Name, shape and dtype go first: equal bytes in another shape are another input.
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        # As bytes, since NumPy has no bf16.
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest() if inputs else b""
