"""Models that are compared on CPUs: 6 layers of width 384, tied embeddings, vocabulary 50,304, batches of 8 x 256."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """family: gpt (LayerNorm, GELU, learned positions, biases), llama (RMSNorm, SwiGLU, rotary) or mixtral. groups: of
    heads that share keys and values; None: every head has its own."""

    family: str
    ffn: int
    experts: int = 0
    topk: int = 2
    layers: int = 6
    hidden: int = 384
    heads: int = 6
    vocab: int = 50304
    sequence: int = 256
    batch: int = 8
    groups: int | None = None
    tied: bool = True

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def gated(self) -> bool:
        return self.family != "gpt"


CASES = {
    "GPT": Case("gpt", 1536),
    "Llama": Case("llama", 1024),
    "MoE of 8 experts, top-2": Case("mixtral", 768, experts=8),
}
