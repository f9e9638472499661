"""Kimi K3 in plain torch, from the formulas and with the names of published files: a delta rule of one position after
the other, experts in a loop, sums of outputs in a list."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]
H, VOCAB, LAYERS, BLOCK = 24, 61, 7, 3
HEADS, SIZE, TAPS, BOUND = 3, 6, 3, -5.0
ATTENTION = {"heads": 2, "q": 14, "kv": 10, "plain": 8, "shared": 4, "value": 5}
EXPERTS = {"number": 6, "chosen": 3, "width": 9, "latent": 16, "shared": 2, "scale": 1.5}
FFN, EPSILON, LATENT_EPSILON = 40, 0.1, 1e-6
FULL = (3, 7)
"""Layers of latent attention, counted from 1. With the second of them a run begins, as with delta nets."""
BETA, LINEAR_BETA = 0.7, 0.9
"""Smaller than published, so that both bounds are reached. EPSILON is larger: norms of sums that nearly cancel would
enlarge rounding errors."""
P = "language_model.model."

TEXT = {
    "model_type": "kimi_linear",
    "vocab_size": VOCAB,
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": ATTENTION["heads"],
    "num_key_value_heads": ATTENTION["heads"],
    "intermediate_size": FFN,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPSILON,
    "hidden_act": "situ",
    "activation_situ_beta": BETA,
    "activation_situ_linear_beta": LINEAR_BETA,
    "attn_res_block_size": BLOCK,
    "q_lora_rank": ATTENTION["q"],
    "kv_lora_rank": ATTENTION["kv"],
    "qk_nope_head_dim": ATTENTION["plain"],
    "qk_rope_head_dim": ATTENTION["shared"],
    "v_head_dim": ATTENTION["value"],
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": EXPERTS["number"],
    "num_experts_per_token": EXPERTS["chosen"],
    "num_shared_experts": EXPERTS["shared"],
    "moe_intermediate_size": EXPERTS["width"],
    "routed_expert_hidden_size": EXPERTS["latent"],
    "latent_moe_use_norm": True,
    "routed_scaling_factor": EXPERTS["scale"],
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "full_attn_layers": list(FULL),
        "kda_layers": [layer for layer in range(1, LAYERS + 1) if layer not in FULL],
        "num_heads": HEADS,
        "head_dim": SIZE,
        "short_conv_kernel_size": TAPS,
        "use_full_rank_gate": True,
        "gate_lower_bound": BOUND,
    },
}
EXTERNAL = {"model_type": "kimi_k3", "text_config": TEXT}


# -- weights -------------------------------------------------------------------------------------------


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        f"{P}embed_tokens.weight": (VOCAB, H),
        "language_model.lm_head.weight": (VOCAB, H),
        f"{P}norm.weight": (H,),
        **_residual(f"{P}output_attn"),
    }
    for i in range(LAYERS):
        p = f"{P}layers.{i}."
        found |= {f"{p}input_layernorm.weight": (H,), f"{p}post_attention_layernorm.weight": (H,)}
        found |= {**_residual(f"{p}self_attention"), **_residual(f"{p}mlp")}
        found |= _latent_shapes(f"{p}self_attn.") if i + 1 in FULL else _delta_shapes(f"{p}self_attn.")
        found |= _expert_shapes(f"{p}block_sparse_moe.") if i else _mlp_shapes(f"{p}mlp.", FFN)
    return found


def _residual(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}_res_norm.weight": (H,), f"{name}_res_proj.weight": (1, H)}


def _delta_shapes(p: str) -> dict[str, tuple[int, ...]]:
    width = HEADS * SIZE
    return {
        **{f"{p}{name}_proj.weight": (width, H) for name in "qkvg"},
        **{f"{p}{name}_conv1d.weight": (width, 1, TAPS) for name in "qkv"},
        f"{p}f_a_proj.weight": (SIZE, H),
        f"{p}f_b_proj.weight": (width, SIZE),
        f"{p}b_proj.weight": (HEADS, H),
        f"{p}A_log": (128,),
        f"{p}dt_bias": (width,),
        f"{p}o_norm.weight": (SIZE,),
        f"{p}o_proj.weight": (H, width),
    }


def _latent_shapes(p: str) -> dict[str, tuple[int, ...]]:
    a, n = ATTENTION, ATTENTION["heads"]
    return {
        f"{p}q_a_proj.weight": (a["q"], H),
        f"{p}q_a_layernorm.weight": (a["q"],),
        f"{p}q_b_proj.weight": (n * (a["plain"] + a["shared"]), a["q"]),
        f"{p}kv_a_proj_with_mqa.weight": (a["kv"] + a["shared"], H),
        f"{p}kv_a_layernorm.weight": (a["kv"],),
        f"{p}kv_b_proj.weight": (n * (a["plain"] + a["value"]), a["kv"]),
        f"{p}g_proj.weight": (n * a["value"], H),
        f"{p}o_proj.weight": (H, n * a["value"]),
    }


def _mlp_shapes(p: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{p}gate_proj.weight": (width, H),
        f"{p}up_proj.weight": (width, H),
        f"{p}down_proj.weight": (H, width),
    }


def _expert_shapes(p: str) -> dict[str, tuple[int, ...]]:
    latent, width = EXPERTS["latent"], EXPERTS["width"]
    found = _mlp_shapes(f"{p}shared_experts.", EXPERTS["shared"] * width)
    for e in range(EXPERTS["number"]):
        found |= {f"{p}experts.{e}.{name}.weight": (width, latent) for name in ("w1", "w3")}
        found[f"{p}experts.{e}.w2.weight"] = (latent, width)
    return found | {
        f"{p}gate.weight": (EXPERTS["number"], H),
        f"{p}gate.e_score_correction_bias": (EXPERTS["number"],),
        f"{p}routed_expert_down_proj.weight": (latent, H),
        f"{p}routed_expert_norm.weight": (latent,),
        f"{p}routed_expert_up_proj.weight": (H, latent),
    }


def precise_state() -> State:
    """The same in fp64, in which the formulas are computed."""
    return {name: value.double() for name, value in random_state().items()}


def random_state() -> State:
    """Values far from initial ones; A_log has numbers for its heads, and zeros behind them."""
    generator = torch.Generator().manual_seed(0)
    state = {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes().items()}
    for name, value in state.items():
        if name.endswith("norm.weight"):
            value += 1.0
        elif name.endswith("A_log"):
            value[HEADS:] = 0.0
    return state


# -- formulas ------------------------------------------------------------------------------------------


def logits(state: State, tokens: Tensor) -> Tensor:
    """[S] ids of one text -> [S, vocab]"""
    total: Tensor = state[f"{P}embed_tokens.weight"][tokens]
    bank: list[Tensor] = []
    for i in range(LAYERS):
        p = f"{P}layers.{i}."
        x = weighed(state, f"{p}self_attention", [*bank, total]) if bank else total
        x = norm(x, state[f"{p}input_layernorm.weight"])
        x = attention(state, f"{p}self_attn.", x) if i + 1 in FULL else delta_net(state, f"{p}self_attn.", x)
        if i % BLOCK == 0:
            bank.append(total)
            total = x
        else:
            total = total + x
        x = norm(weighed(state, f"{p}mlp", [*bank, total]), state[f"{p}post_attention_layernorm.weight"])
        total = total + (experts(state, f"{p}block_sparse_moe.", x) if i else mlp(state, f"{p}mlp.", x))
    x = weighed(state, f"{P}output_attn", [*bank, total])
    return norm(x, state[f"{P}norm.weight"]) @ state["language_model.lm_head.weight"].T


def norm(x: Tensor, weight: Tensor, epsilon: float = EPSILON) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


def weighed(state: State, name: str, sources: list[Tensor]) -> Tensor:
    query = state[f"{name}_res_proj.weight"][0]
    scores = [(norm(source, state[f"{name}_res_norm.weight"]) * query).sum(-1) for source in sources]
    shares = torch.stack(scores).softmax(0)
    return sum(share[:, None] * source for share, source in zip(shares, sources, strict=True))


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate) * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)


def mlp(state: State, p: str, x: Tensor) -> Tensor:
    gate, up = (x @ state[f"{p}{name}_proj.weight"].T for name in ("gate", "up"))
    return situ(gate, up) @ state[f"{p}down_proj.weight"].T


def experts(state: State, p: str, x: Tensor) -> Tensor:
    scores = torch.sigmoid(x @ state[f"{p}gate.weight"].T)
    latents = x @ state[f"{p}routed_expert_down_proj.weight"].T
    rows = []
    for score, latent in zip(scores, latents, strict=True):
        chosen = (score + state[f"{p}gate.e_score_correction_bias"]).topk(EXPERTS["chosen"]).indices
        row = 0.0
        for e in chosen.tolist():
            w1, w2, w3 = (state[f"{p}experts.{e}.w{n}.weight"] for n in (1, 2, 3))
            row = row + EXPERTS["scale"] * score[e] / score[chosen].sum() * (w2 @ situ(w1 @ latent, w3 @ latent))
        rows.append(row)
    routed = norm(torch.stack(rows), state[f"{p}routed_expert_norm.weight"])
    return routed @ state[f"{p}routed_expert_up_proj.weight"].T + mlp(state, f"{p}shared_experts.", x)


def attention(state: State, p: str, x: Tensor) -> Tensor:
    a, n, length = ATTENTION, ATTENTION["heads"], len(x)
    latent = norm(x @ state[f"{p}q_a_proj.weight"].T, state[f"{p}q_a_layernorm.weight"], LATENT_EPSILON)
    q = (latent @ state[f"{p}q_b_proj.weight"].T).view(length, n, -1)
    latent, shared = (x @ state[f"{p}kv_a_proj_with_mqa.weight"].T).split((a["kv"], a["shared"]), -1)
    latent = norm(latent, state[f"{p}kv_a_layernorm.weight"], LATENT_EPSILON)
    plain, v = (latent @ state[f"{p}kv_b_proj.weight"].T).view(length, n, -1).split((a["plain"], a["value"]), -1)
    k = torch.cat((plain, shared[:, None].expand(-1, n, -1)), -1)
    scores = torch.einsum("qnd,knd->nqk", q, k) * (a["plain"] + a["shared"]) ** -0.5
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("nqk,knd->qnd", scores.softmax(-1), v).flatten(1)
    return (out * torch.sigmoid(x @ state[f"{p}g_proj.weight"].T)) @ state[f"{p}o_proj.weight"].T


def delta_net(state: State, p: str, x: Tensor) -> Tensor:
    q, k, v = (_convolved(state, p, name, x).view(len(x), HEADS, SIZE) for name in "qkv")
    q, k = (y / torch.sqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    f = x @ state[f"{p}f_a_proj.weight"].T @ state[f"{p}f_b_proj.weight"].T + state[f"{p}dt_bias"]
    rates = state[f"{p}A_log"][:HEADS].exp()[:, None]
    decays = (BOUND * torch.sigmoid(rates * f.view(len(x), HEADS, SIZE))).exp()
    beta = torch.sigmoid(x @ state[f"{p}b_proj.weight"].T)
    memory = torch.zeros(HEADS, SIZE, SIZE, dtype=x.dtype)  # key by value
    rows = []
    for t in range(len(x)):
        memory = decays[t][:, :, None] * memory
        update = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], memory))
        memory = memory + torch.einsum("hk,hv->hkv", k[t], update)
        rows.append(torch.einsum("hk,hkv->hv", q[t], memory) * SIZE**-0.5)
    gate = torch.sigmoid(x @ state[f"{p}g_proj.weight"].T).view(len(x), HEADS, SIZE)
    out = norm(torch.stack(rows), state[f"{p}o_norm.weight"]) * gate
    return out.flatten(1) @ state[f"{p}o_proj.weight"].T


def _convolved(state: State, p: str, name: str, x: Tensor) -> Tensor:
    rows = F.pad(x @ state[f"{p}{name}_proj.weight"].T, (0, 0, TAPS - 1, 0))
    taps = state[f"{p}{name}_conv1d.weight"].squeeze(1)
    return F.silu(sum(taps[:, i] * rows[i : i + len(x)] for i in range(TAPS)))
