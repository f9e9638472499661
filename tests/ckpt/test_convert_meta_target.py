"""Llama as Meta publishes it: what a reader by Meta's rules computes from the files that are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.convert_cases import LLAMA
from tests.ckpt.test_convert_meta import DIM, FFN, GROUPS, HEADS, LAYERS, VOCAB, logits, reference
from torch import Tensor

from mt_ckpt.convert import convert
from mt_ckpt.meta.params import feed_forward_params
from mt_ckpt.native.read import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import ConfigError

LLAMA_3 = {
    "family": "llama", "num_layers": LAYERS, "hidden_size": DIM, "num_attention_heads": HEADS, "vocab_size": VOCAB,
    "num_query_groups": GROUPS, "ffn_hidden_size": FFN, "norm_epsilon": 1e-5, "rotary_base": 500000.0,
    "max_position_embeddings": 8192,
}  # fmt: skip
TIED = {"untie_embeddings_and_output_weights": False}
LLAMA_2 = {"rotary_base": 10000.0, "max_position_embeddings": 4096}
COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
TOKENS = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))


def options(ranks: int) -> ConvertOptions:
    return ConvertOptions(target_tensor_parallel_size=ranks)


def joined(folder: Path, embedding_dim: int) -> dict[str, Tensor]:
    """The whole tensors by the classes of Meta's code: row-parallel ones are cut along columns, norms are copies."""
    files = sorted(folder.glob("consolidated.*.pth"))
    shards = [torch.load(file, weights_only=True) for file in files]
    whole = {}
    for name, first in shards[0].items():
        parts = [shard[name] for shard in shards]
        if first.ndim == 1:
            assert all(torch.equal(first, part) for part in parts)
            whole[name] = first
        else:
            whole[name] = torch.cat(parts, embedding_dim if "tok_emb" in name else int(name.endswith(COLUMNS)))
    return whole


@pytest.mark.parametrize(
    ("ranks", "keys", "embedding_dim"),
    [(1, {}, 0), (2, {}, 0), (2, TIED, 0), (2, LLAMA_2, 1), (1, {**LLAMA_2, **TIED}, 1)],
)
def test_metas_formulas_compute_what_the_source_does(
    make_model, host, tmp_path: Path, ranks: int, keys: dict, embedding_dim: int
) -> None:
    source = make_model(**{**LLAMA_3, **keys})
    report = convert(source, tmp_path / "meta", saver="meta", options=options(ranks), verify=True, host=host)
    assert report.verification.num_tensors == report.num_tensors
    assert not report.verification.changed_settings
    state = joined(tmp_path / "meta", embedding_dim)
    assert set(state) >= {"tok_embeddings.weight", "output.weight", "norm.weight", "layers.1.attention.wq.weight"}
    base = {**LLAMA_3, **keys}["rotary_base"]
    torch.testing.assert_close(logits(source, host, TOKENS), reference(state, TOKENS, base), atol=2e-4, rtol=1e-4)
    convert(tmp_path / "meta", tmp_path / "back", saver="mt", host=host)
    assert_same_state(tensors_of(open_checkpoint(tmp_path / "back")), tensors_of(open_checkpoint(source)))


def test_each_rank_computes_its_part(make_model, host, tmp_path: Path) -> None:
    """A layer's feed-forward on two ranks by themselves: what they add up to is what the whole one gives."""
    source = make_model(**LLAMA_3)
    convert(source, tmp_path / "meta", saver="meta", options=options(2), host=host)
    ranks = [torch.load(tmp_path / "meta" / f"consolidated.0{rank}.pth", weights_only=True) for rank in range(2)]
    state, x = joined(tmp_path / "meta", 0), torch.randn(3, DIM)

    def feed_forward(weights: dict[str, Tensor]) -> Tensor:
        w1, w2, w3 = (weights[f"layers.0.feed_forward.w{i}.weight"] for i in (1, 2, 3))
        return (torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T

    torch.testing.assert_close(feed_forward(ranks[0]) + feed_forward(ranks[1]), feed_forward(state))
    assert ranks[0]["layers.0.attention.wk.weight"].shape == (DIM // HEADS, DIM)
    assert ranks[0]["output.weight"].shape == (VOCAB // 2, DIM)


def width_by_metas_code(dim: int, multiple_of: int, ffn_dim_multiplier: float | None = None) -> int:
    hidden_dim = int(2 * (4 * dim) / 3)
    if ffn_dim_multiplier is not None:
        hidden_dim = int(ffn_dim_multiplier * hidden_dim)
    return multiple_of * ((hidden_dim + multiple_of - 1) // multiple_of)


@pytest.mark.parametrize(
    ("dim", "width"),
    [(4096, 14336), (8192, 28672), (16384, 53248), (4096, 11008), (5120, 13824), (2048, 8192), (3072, 8192), (32, 48)],
)
def test_params_give_the_width_of_the_feed_forward(dim: int, width: int) -> None:
    """Published sizes, and one of the tests."""
    assert width_by_metas_code(dim, **feed_forward_params(dim, width)) == width


def test_any_width_can_be_written() -> None:
    for dim in (32, 96, 1000):
        for width in range(1, 400, 7):
            assert width_by_metas_code(dim, **feed_forward_params(dim, width)) == width


def test_params(make_model, host, tmp_path: Path) -> None:
    scaling = {"rope_scaling_type": "llama3", "rope_scaling_factor": 32.0, "original_max_position_embeddings": 8192}
    keys = {**LLAMA_3, **scaling, "max_position_embeddings": 131072}
    convert(make_model(**keys), tmp_path / "meta", saver="meta", host=host, verify=True)
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    assert params == {
        "dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": GROUPS, "vocab_size": VOCAB, "norm_eps": 1e-5,
        "multiple_of": 16, "ffn_dim_multiplier": 0.5, "rope_theta": 500000.0, "use_scaled_rope": True,
    }  # fmt: skip
    convert(make_model("eight", **{**keys, "rope_scaling_factor": 8.0}), tmp_path / "8", saver="meta", host=host)
    assert json.loads((tmp_path / "8" / "params.json").read_text())["rope_scaling_factor"] == 8.0


def test_a_gpt_that_is_a_llama_in_all_but_name(make_model, host, tmp_path: Path) -> None:
    keys = {key: value for key, value in LLAMA_3.items() if key != "max_position_embeddings"}
    gpt = {**keys, "family": "gpt", "position_embedding_type": "rope", "normalization": "RMSNorm"}
    gpt |= {"activation": "swiglu", "add_bias_linear": False, "untie_embeddings_and_output_weights": True}
    source = make_model(**gpt)
    convert(source, tmp_path / "meta", saver="meta", options=options(2), verify=True, host=host)
    expected = reference(joined(tmp_path / "meta", 0), TOKENS, 500000.0)
    torch.testing.assert_close(logits(source, host, TOKENS), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "ranks", "words"),
    [
        ({"kv_channels": 12}, 1, "model.kv_channels=12 cannot be written as Meta's Llama"),
        ({"mlp_bias": True}, 1, "model.attention_bias and model.mlp_bias have to be false"),
        (
            {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0},
            1,
            "cannot be written as Meta's Llama, whose code",
        ),
        ({"family": "qwen", "add_qkv_bias": False, "qk_layernorm": True}, 1, "this model is a qwen3"),
        ({}, 4, "--target-tensor-parallel-size 4 does not divide model.num_query_groups=2"),
        (
            {**TIED, "rotary_base": 10000.0, "vocab_size": 60},
            2,
            "before Llama 3 Meta cuts the embedding along the hidden size",
        ),
    ],
)
def test_refusals(make_model, host, tmp_path: Path, keys: dict, ranks: int, words: str) -> None:
    source = make_model(**{**LLAMA, **keys})
    with pytest.raises(ConfigError, match=words):
        convert(source, tmp_path / "x", saver="meta", options=options(ranks), host=host)
    assert not (tmp_path / "x").exists()
