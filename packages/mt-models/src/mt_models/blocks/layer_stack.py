"""Layers by their numbers, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from mt_core.nn.model import NumberedLayers
from mt_core.nn.recompute import Call, Recompute
from mt_core.parallel.pipeline.stage import Stage


class LayerStack(nn.Module):
    """The layers that are held here, and the norm behind the last of the model if it is here and there is one."""

    def __init__(
        self, layers: Mapping[int, nn.Module], recompute: Recompute, final_layernorm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = NumberedLayers(layers.items())
        self.final_layernorm = final_layernorm

    def through(self, x: Tensor, call: Call, stage: Stage | None) -> Tensor:
        """[B, S, H] -> [B, S, H] through the layers of the stage, each by `call`; default: all of them."""
        # With interleaved stages a process holds the layers of several, of which one pass runs those of one.
        numbers = self.layers.numbers() if stage is None else stage.layers
        x = self.recompute.run([(number, self.layers[number]) for number in numbers], x, call)
        if self.final_layernorm is None or (stage is not None and not stage.last):
            return x
        return self.final_layernorm(x)

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        """The layers of the stage, and the norm behind the last."""
        yield from (self.layers[number] for number in stage.layers)
        if stage.last and self.final_layernorm is not None:
            yield self.final_layernorm
