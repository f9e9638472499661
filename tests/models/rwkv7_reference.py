"""RWKV-7 in plain torch, from the formulas and with the names of published files: one position after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]
SIZES = {"hidden": 24, "heads": 3, "layers": 3, "ffn": 40, "vocab": 61}
RANKS = {"w": 5, "a": 7, "v": 3, "g": 6}
EPSILON = 1e-5


def random_state() -> State:
    """Values far from initial ones."""
    generator = torch.Generator().manual_seed(0)
    hidden, vocab = SIZES["hidden"], SIZES["vocab"]
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    norms = ["model.norm", "model.layers.0.pre_norm"]
    for i in range(SIZES["layers"]):
        layer, attn = f"model.layers.{i}.", f"model.layers.{i}.attn."
        norms += [f"{layer}attn_norm", f"{layer}ffn_norm", f"{attn}g_norm"]
        shapes |= {f"{attn}x_{name}": (1, 1, hidden) for name in "rwkvag"}
        shapes |= {f"{attn}{name}_proj.weight": (hidden, hidden) for name in "rkvo"}
        shapes |= {f"{attn}k_k": (hidden,), f"{attn}k_a": (hidden,), f"{attn}r_k": (SIZES["heads"], 8)}
        for name, rank in RANKS.items():
            if name != "v" or i:
                shapes |= {f"{attn}{name}_lora.lora.0.weight": (rank, hidden)}
                shapes |= {f"{attn}{name}_lora.lora.2.weight": (hidden, rank)}
                shapes |= {} if name == "g" else {f"{attn}{name}_lora.lora.2.bias": (hidden,)}
        shapes |= {f"{layer}ffn.x_k": (hidden,), f"{layer}ffn.key.weight": (SIZES["ffn"], hidden)}
        shapes |= {f"{layer}ffn.value.weight": (hidden, SIZES["ffn"])}
    shapes |= {f"{name}.{kind}": (hidden,) for name in norms for kind in ("weight", "bias")}
    return {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


EXTERNAL = {
    "model_type": "rwkv7",
    "hidden_size": SIZES["hidden"],
    "num_hidden_layers": SIZES["layers"],
    "head_dim": 8,
    "intermediate_size": SIZES["ffn"],
    "vocab_size": SIZES["vocab"],
    "decay_low_rank_dim": RANKS["w"],
    "a_low_rank_dim": RANKS["a"],
    "v_low_rank_dim": RANKS["v"],
    "gate_low_rank_dim": RANKS["g"],
}


def logits(state: State, tokens: Tensor) -> Tensor:
    """[S] ids of one text -> [S, vocab]"""
    x = norm(state, "model.layers.0.pre_norm", state["model.embeddings.weight"][tokens])
    first = torch.empty(0)
    for i in range(SIZES["layers"]):
        layer = f"model.layers.{i}."
        added, values = time_mixing(state, f"{layer}attn.", norm(state, f"{layer}attn_norm", x), first, i)
        first = values if i == 0 else first
        x = x + added
        x = x + channel_mixing(state, f"{layer}ffn.", norm(state, f"{layer}ffn_norm", x))
    return norm(state, "model.norm", x) @ state["lm_head.weight"].T


def norm(state: State, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], EPSILON)


def before(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


def low_rank(state: State, name: str, x: Tensor, activation) -> Tensor:
    inner = activation(x @ state[f"{name}.lora.0.weight"].T)
    out = inner @ state[f"{name}.lora.2.weight"].T
    return out + state[f"{name}.lora.2.bias"] if f"{name}.lora.2.bias" in state else out


def time_mixing(state: State, p: str, x: Tensor, first: Tensor, number: int) -> tuple[Tensor, Tensor]:
    heads = SIZES["heads"]
    mixed = {name: x + (before(x) - x) * state[f"{p}x_{name}"].flatten() for name in "rwkvag"}
    r, k, v = (mixed[name] @ state[f"{p}{name}_proj.weight"].T for name in "rkv")
    decay = torch.exp(-0.6065306597126334 * low_rank(state, f"{p}w_lora", mixed["w"], torch.tanh).sigmoid())
    a = low_rank(state, f"{p}a_lora", mixed["a"], lambda y: y).sigmoid()
    g = low_rank(state, f"{p}g_lora", mixed["g"], torch.sigmoid)
    if number:
        share = low_rank(state, f"{p}v_lora", mixed["v"], lambda y: y).sigmoid()
        v = v + (first - v) * share
    kk = F.normalize((k * state[f"{p}k_k"]).view(len(x), heads, -1), dim=-1)
    k = k * (1 + (a - 1) * state[f"{p}k_a"])
    r_, w_, k_, v_, a_ = (y.view(len(x), heads, -1) for y in (r, decay, k, v, a))
    memory = torch.zeros(heads, 8, 8, dtype=x.dtype)  # value by key, as in the paper
    rows = []
    for t in range(len(x)):
        lost = torch.einsum("hvk,hk,hj->hvj", memory, kk[t], kk[t] * a_[t])
        memory = memory * w_[t][:, None] - lost + torch.einsum("hv,hk->hvk", v_[t], k_[t])
        rows.append(torch.einsum("hvk,hk->hv", memory, r_[t]).flatten())
    o = F.group_norm(torch.stack(rows), heads, state[f"{p}g_norm.weight"], state[f"{p}g_norm.bias"], 8 * EPSILON)
    o = o + ((r_ * k_ * state[f"{p}r_k"]).sum(-1, keepdim=True) * v_).flatten(1)
    return (o * g) @ state[f"{p}o_proj.weight"].T, v


def channel_mixing(state: State, p: str, x: Tensor) -> Tensor:
    mixed = x + (before(x) - x) * state[f"{p}x_k"]
    return F.relu(mixed @ state[f"{p}key.weight"].T).square() @ state[f"{p}value.weight"].T
