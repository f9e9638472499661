"""Multi-token prediction of decoders on residual streams, as Megatron-Core has it.

With streams X [n, H] of depth d - 1 (of the last layer before the first depth) and the embedding e of token i + d:

    X <- layer(e_proj enorm(e) + h_proj hnorm(X_j), for each stream j)      h_d = norm(sum of the streams)

The sum has weights of its own that are learned. The next depth reads the streams. Names of the parameters are
Megatron's, but for those of the sum (`mt_ckpt.megatron.names`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.cache import Cache
from mt_core.nn.layout import normal
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.multi_token import TokenPrediction
from mt_models.blocks.residual_streams import StreamKeysLike, stream_head
from mt_models.blocks.rotary import RotaryAngles


class StreamPrediction(TokenPrediction):
    """One depth: streams [B, S, n H] of the depth before -> the same. e_proj and h_proj [H, H] are replicated on every
    tensor-parallel rank."""

    def __init__(
        self, config: StreamKeysLike, layer: nn.Module, norm: Callable[[], nn.Module], ctx: ParallelContext
    ) -> None:
        nn.Module.__init__(self)
        hidden, init = config.hidden_size, normal(config.init_method_std)
        self.streams = config.mhc_num_residual_streams
        self.enorm, self.hnorm = norm(), norm()
        self.e_proj = ReplicatedLinear(hidden, hidden, ctx, init=init, bias=False, on_sequence=True)
        self.h_proj = ReplicatedLinear(hidden, hidden, ctx, init=init, bias=False, on_sequence=True)
        self.mtp_model_layer = layer
        self.hyper_head = stream_head(config, ctx)
        self.final_layernorm = norm()

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: Cache | None = None,
    ) -> Tensor:
        before = self.hnorm(hidden.unflatten(-1, (self.streams, -1)))
        started = self.e_proj(self.enorm(embedded)).unsqueeze(-2) + self.h_proj(before)
        streams: Tensor = self.mtp_model_layer(started.flatten(-2), pattern, angles, cache)
        return streams

    def head_input(self, state: Tensor) -> Tensor:
        """Streams [B, S, n H] of the depth -> norm(their sum), [B, S, H]."""
        normed: Tensor = self.final_layernorm(self.hyper_head(state))
        return normed
