"""Multi-token prediction of decoders on residual streams, as Megatron-Core has it.

With streams X [n, H] of depth d - 1 (of the last layer before the first depth) and the embedding e of token i + d:

    X <- layer(e_proj enorm(e) + h_proj hnorm(X_j), for each stream j)      h_d = norm(sum of the streams)

The sum has weights of its own that are learned. The next depth reads the streams. Names of the parameters are
Megatron's, but for those of the sum (`mt_ckpt.megatron.names`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mt_core.parallel.context import ParallelContext
from mt_models.blocks.multi_token import StreamTokenPrediction
from mt_models.blocks.residual_streams import StreamKeysLike, stream_head


class StreamPrediction(StreamTokenPrediction):
    """One depth: streams [B, S, n H] of the depth before -> the same."""

    def __init__(
        self, config: StreamKeysLike, layer: nn.Module, norm: Callable[[], nn.Module], ctx: ParallelContext
    ) -> None:
        streams = config.mhc_num_residual_streams
        super().__init__(config, layer, ctx, streams=streams, enorm=norm(), hnorm=norm())
        self.hyper_head = stream_head(config, ctx)
        self.final_layernorm = norm()

    def head_input(self, state: Tensor) -> Tensor:
        """Streams [B, S, n H] of the depth -> norm(their sum), [B, S, H]."""
        normed: Tensor = self.final_layernorm(self.hyper_head(state))
        return normed
