"""Noise on the router's input (Fedus et al., Switch Transformers, 2022), the same in every parallel layout."""

from __future__ import annotations

from torch import Tensor

from mt_core.nn.dropout import SampleNoise
from mt_core.parallel.context import ParallelContext
from mt_moe.tokens import TokenShare, own_tokens


class InputJitter(SampleNoise):
    """In training multiplies each element by a number drawn from [1 - epsilon, 1 + epsilon]."""

    def __init__(self, epsilon: float | None, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.epsilon = epsilon

    def forward(self, share: TokenShare) -> Tensor:
        """-> this rank's tokens [T, H] with noise. Every rank draws for whole sequences."""
        if self.epsilon is None or not self.training:
            return share.tokens
        self.seed()
        # [B, S, H] of whole sequences, of which each rank keeps the part of its own tokens: so the noise of a token
        # does not depend on the layout.
        shape = (share.num_sequences, share.total // share.num_sequences, share.tokens.shape[1])
        noise = share.tokens.new_empty(shape).uniform_(1.0 - self.epsilon, 1.0 + self.epsilon)
        return share.tokens * own_tokens(self.own_positions(noise).flatten(0, 1), self.ctx)
