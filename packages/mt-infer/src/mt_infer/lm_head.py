"""The memory layout of the LM head for decoding on a CPU."""

from __future__ import annotations

from torch import nn

from mt_core.nn.embedding import VocabParallelEmbedding, VocabParallelOutput


def store_by_columns(model: nn.Module) -> None:
    """Stores token embeddings and LM heads [vocab, hidden] column by column, in place. Values and shapes stay.

    The product of one row with them reads them in long runs of the vocabulary then, which takes half the time on CPUs
    (docs/numbers.md).
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding | VocabParallelOutput):
            # [vocab, hidden] with strides (1, vocab). Tied weights are one parameter and change once; the second time
            # copies nothing new.
            module.weight.data = module.weight.data.t().contiguous().t()
