"""NVIDIA Apex: norms and rotary embedding."""

from __future__ import annotations

from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
from apex.transformer.functional.fused_rope import fused_apply_rotary_pos_emb_cached
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    return fused_rms_norm_affine(x, weight, weight.shape, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    return fused_layer_norm_affine(x, weight, bias, weight.shape, eps)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Apex takes [S, B, N, D] and the angles of both halves, [S, 1, 1, R]."""
    cos, sin = (_both_halves(angles) for angles in (cos, sin))
    # transpose: [B, S, N, D] -> [S, B, N, D]
    turned_q, turned_k = (fused_apply_rotary_pos_emb_cached(x.transpose(0, 1), cos, sin) for x in (q, k))
    return turned_q.transpose(0, 1), turned_k.transpose(0, 1)


def _both_halves(angles: Tensor) -> Tensor:
    """[1, S, 1, R / 2] -> [S, 1, 1, R]"""
    return angles.transpose(0, 1).repeat(1, 1, 1, 2)
