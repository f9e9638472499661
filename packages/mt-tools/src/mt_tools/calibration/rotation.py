"""Rotations that leave the model's outputs as they are and its weights without outliers (QuaRot, SpinQuant): of the
residual stream, and of each head's values. Folded into the weights in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.embedding import VocabParallelEmbedding, VocabParallelOutput
from mt_core.nn.layout import LayoutModule
from mt_core.nn.norm import RMSNorm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.transformer import TransformerLayer
from mt_tools.calibration.folding import require_foldable
from mt_tools.calibration.matrices import WEIGHT, Matrix

SEED = 0


def rotation(size: int) -> Tensor:
    """[size, size] orthogonal, fp64: Hadamard matrices of the largest power of two that divides `size`, on the
    diagonal, and random signs."""
    power = size & -size
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < power:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(SEED)).double() * 2 - 1
    return torch.block_diag(*[hadamard / power**0.5] * (size // power)) * signs[:, None]


@torch.no_grad()
def rotate_model(
    model: nn.Module, ctx: ParallelContext, *, residual: bool, values: bool, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """In place. Returns the parameters of this stage that have changed, beside matrices of linear layers, by name.
    dtype: that they are stored in. Collective over tp.

    Raises ConfigError for blocks that are not as Llama has them, and with `residual` for an LM head that is tied to the
    embedding, or norms with a mean.
    """
    require_foldable(model)
    changed: dict[str, Tensor] = {}
    if values:
        _rotate_values(model)
    if residual:
        _require_rotatable(model)
        changed |= _absorb_norms(model)
        changed |= _rotate_residual(model, ctx, dtype)
    return changed


# -- values: each head's, before linear_proj ----------------------------------------------------------


def _rotate_values(model: nn.Module) -> None:
    for attention in (module for module in model.modules() if isinstance(module, SelfAttention)):
        turn = rotation(attention.head_dim)
        qkv, proj = (Matrix("", getattr(attention, name)) for name in ("linear_qkv", "linear_proj"))
        # [groups, queries of the group, key and value, size, in]
        shape = (attention.query_groups, attention.heads_per_group + 2, attention.head_dim)
        _put_values(qkv, turn.to(qkv.module.ctx.device), shape)
        heads = proj.gather().double().unflatten(1, (-1, attention.head_dim))
        proj.put((heads @ turn.to(heads.device)).flatten(1).float())


def _put_values(qkv: Matrix, turn: Tensor, shape: tuple[int, ...]) -> None:
    bias = getattr(qkv.module, "bias", None)
    if bias is not None:
        raise ConfigError("--method rotate-values: linear_qkv has a bias, which is not rotated; use rotate alone")
    rows = qkv.gather().double().unflatten(0, shape)
    rows[:, -1] = turn.T @ rows[:, -1]
    qkv.put(rows.flatten(0, 2).float())


# -- the residual stream -------------------------------------------------------------------------------


def _require_rotatable(model: nn.Module) -> None:
    if not getattr(getattr(model, "config", None), "untie_embeddings_and_output_weights", False):
        raise ConfigError(
            "--method rotate: the LM head is the matrix of the embeddings, into which the final norm cannot be folded; "
            "use rotate-values, which does not touch it"
        )
    if getattr(getattr(model, "config", None), "enable_mhc_connections", False):
        raise ConfigError(
            "--method rotate: hyper-connections (model.enable_mhc_connections=true) read the residual streams, and "
            "their weights are not rotated; use rotate-values"
        )
    for path, module in model.named_modules():
        if path.endswith("layernorm") and "self_attention" not in path and type(module) is not RMSNorm:
            raise ConfigError(f"--method rotate: {path} is a {type(module).__name__}, which a rotation changes")
        if path.split(".")[-1] in ("linear_proj", "linear_fc2") and getattr(module, "bias", None) is not None:
            raise ConfigError(f"--method rotate: {path} has a bias, which is not rotated")


def _absorb_norms(model: nn.Module) -> dict[str, Tensor]:
    """Weights of norms become 1; the matrices behind them are multiplied."""
    changed: dict[str, Tensor] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, TransformerLayer):
            pairs = [
                ("input_layernorm", layer.input_layernorm, layer.self_attention.linear_qkv),
                ("pre_mlp_layernorm", layer.pre_mlp_layernorm, layer.mlp.linear_fc1),
            ]
            for name, norm, linear in pairs:
                changed |= _absorb(f"{path}.{name}.{WEIGHT}", norm, linear)  # type: ignore[arg-type]
    final = getattr(model.decoder, "final_layernorm", None)
    output = getattr(model, "output_layer", None)
    if final is not None and output is not None:
        changed |= _absorb(f"decoder.final_layernorm.{WEIGHT}", final, output)
    return changed


def _absorb(name: str, norm: RMSNorm, linear: LayoutModule) -> dict[str, Tensor]:
    weight: Tensor = getattr(linear, WEIGHT)
    weight.copy_(weight.double() * norm.weight.double())
    norm.weight.fill_(1.0)
    return {name: norm.weight.detach()}


def _rotate_residual(model: nn.Module, ctx: ParallelContext, dtype: torch.dtype) -> dict[str, Tensor]:
    changed: dict[str, Tensor] = {}
    turn: Tensor | None = None
    for path, module, reads in _beside_residual(model):
        weight: Tensor = getattr(module, WEIGHT)
        if turn is None:
            turn = rotation(weight.shape[-1] if reads else weight.shape[0]).to(ctx.device)
        weight.copy_(weight.double() @ turn if reads else turn.T @ weight.double())
        if isinstance(module, VocabParallelEmbedding | VocabParallelOutput):
            weight.copy_(weight.to(dtype))
            changed[f"{path}.{WEIGHT}"] = module.layouts[WEIGHT].to_canonical(weight.detach(), ctx)
    return changed


def _beside_residual(model: nn.Module) -> Iterator[tuple[str, LayoutModule, bool]]:
    """Modules that read the residual stream, or whose rows are added to it (the embedding), and those whose outputs
    are (False)."""
    for path, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding | VocabParallelOutput) or (
            isinstance(module, LayoutModule) and path.split(".")[-1] in ("linear_qkv", "linear_fc1")
        ):
            yield path, module, True
        elif isinstance(module, LayoutModule) and path.split(".")[-1] in ("linear_proj", "linear_fc2"):
            yield path, module, False
