"""Factors of features that move from a layer into the one before it, in blocks as Llama has them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.activations import is_gated
from mt_core.nn.feed_forward import DenseFeedForward
from mt_core.nn.layout import LayoutModule
from mt_core.nn.norm import LayerNorm, Norm, RMSNorm
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.transformer import TransformerLayer
from mt_tools.calibration.matrices import WEIGHT, Matrix


@dataclass(frozen=True, eq=False)
class FoldingPoint:
    """A matrix, and what is before it: a norm, or the rows of up in a gated feed-forward. name: canonical, of the
    module before."""

    matrix: Matrix
    name: str
    before: Norm | Matrix

    @torch.no_grad()
    def fold(self, factors: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Multiply the columns of the matrix by factors [in], and divide what is before it. Returns the parameters
        beside matrices that have changed, by name. dtype: that they are stored in. Collective over what shards the
        matrix."""
        self.matrix.put(self.matrix.gather() * factors)
        if isinstance(self.before, Matrix):
            gate, up = self.before.gather().chunk(2)
            self.before.put(torch.cat([gate, up / factors[:, None]]))
            return {}
        changed = {}
        for key, parameter in self.before.named_parameters(recurse=False):
            parameter.copy_((parameter.float() / factors).to(dtype))
            changed[f"{self.name}.{key}"] = parameter.detach()
        return changed


def folding_points(model: nn.Module, matrices: Collection[Matrix]) -> Iterator[FoldingPoint]:
    """In the order in which they are to be folded: the matrix behind up before the one that holds up.

    Raises ConfigError for a layer that is not x + attention(norm(x)), then x + feed_forward(norm(x)).
    """
    by_module = {matrix.module: matrix for matrix in matrices}
    for path, layer in model.named_modules():
        if isinstance(layer, TransformerLayer):
            require_plain(path, layer)
            feed_forward = layer.mlp
            assert isinstance(feed_forward, DenseFeedForward)
            fc1, fc2 = by_module[feed_forward.linear_fc1], by_module[feed_forward.linear_fc2]
            if is_gated(feed_forward.activation):
                yield FoldingPoint(fc2, fc1.name, fc1)
            yield FoldingPoint(fc1, f"{path}.pre_mlp_layernorm", layer.pre_mlp_layernorm)
            attention = layer.self_attention
            assert isinstance(attention, SelfAttention)
            qkv = by_module[attention.linear_qkv]
            yield FoldingPoint(qkv, f"{path}.input_layernorm", layer.input_layernorm)


def require_plain(path: str, layer: TransformerLayer) -> None:
    """Raises ConfigError for a layer of another kind, whose features other modules read too."""
    parts = {
        "the layer": (layer, TransformerLayer),
        "its attention": (layer.self_attention, SelfAttention),
        "its feed-forward": (layer.mlp, DenseFeedForward),
    }
    for what, (module, expected) in parts.items():
        if type(module) is not expected:
            raise ConfigError(_refusal(path, f"{what} is a {type(module).__name__}, not a {expected.__name__}"))
    for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
        if type(norm) not in (RMSNorm, LayerNorm):
            raise ConfigError(_refusal(path, f"its norm is a {type(norm).__name__}"))


def _refusal(path: str, reason: str) -> str:
    folds = "--method smoothquant, awq and rotate fold factors into layers that are built as Llama's"
    return f"{folds}; in {path} {reason}"


def require_foldable(model: nn.Module) -> None:
    """Raises ConfigError for a model with matrices outside of layers that factors can be folded in."""
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, TransformerLayer)]
    for path, layer in layers:
        require_plain(path, layer)
    inside = {module for _, layer in layers for module in layer.modules()}
    for path, module in model.named_modules():
        if isinstance(module, LayoutModule) and path.split(".")[-1].startswith("linear_") and module not in inside:
            raise ConfigError(_refusal(path, f"{WEIGHT} is in no layer of that kind"))
