"""GPT-OSS as Megatron's ranks hold it, with the arguments of its public training scripts; YaRN and windows by layer."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ckpt.megatron.conftest import MODELS, RandomCheckpoint, assert_same_tensors
from tests.ckpt.megatron.handmade import arguments, save_rank
from tests.ckpt.megatron.test_families import columns, randoms, rows, written_model
from tests.ckpt.megatron.test_round_trip import options, through
from torch import Tensor

from mt_ckpt.convert import convert
from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.reader import open_checkpoint
from mt_core.checkpoint_lookup import open_with
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CHECKPOINT_SAVERS, ConvertOptions
from mt_core.config.loading import config_from_dict
from mt_core.errors import CheckpointError, ConfigError
from mt_models.blocks.megatron import windows_of, yarn_section
from mt_models.blocks.rotary import build_rotary

HIDDEN, HEADS, GROUPS, SIZE, VOCAB, EXPERTS, INNER = 16, 4, 2, 6, 40, 2, 8
QKV = (HEADS + 2 * GROUPS) * SIZE
ARGS: dict[str, Any] = {
    "num_layers": 2,
    "encoder_num_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
    "kv_channels": SIZE,
    "ffn_hidden_size": INNER,
    "moe_ffn_hidden_size": INNER,
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "softmax_type": "learnable",
    "window_size": (3, 0),
    "window_attn_skip_freq": 2,
    "position_embedding_type": "yarn",
    "rotary_base": 150000,
    "rotary_percent": 1.0,
    "rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": False,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "max_position_embeddings": 131072,
    "num_experts": EXPERTS,
    "moe_router_topk": 1,
    "moe_grouped_gemm": True,
    "expert_tensor_parallel_size": 1,
}


def whole() -> dict[str, Tensor]:
    """By canonical names, experts stacked."""
    random = randoms()
    tensors = {"embedding.word_embeddings.weight": random(VOCAB, HIDDEN)}
    for layer in range(2):
        stem = f"decoder.layers.{layer}."
        tensors |= {
            f"{stem}input_layernorm.weight": random(HIDDEN),
            f"{stem}self_attention.core_attention.softmax_offset": random(HEADS),
            f"{stem}self_attention.linear_proj.weight": random(HIDDEN, HEADS * SIZE),
            f"{stem}self_attention.linear_proj.bias": random(HIDDEN),
            f"{stem}self_attention.linear_qkv.weight": random(QKV, HIDDEN),
            f"{stem}self_attention.linear_qkv.bias": random(QKV),
            f"{stem}pre_mlp_layernorm.weight": random(HIDDEN),
            f"{stem}mlp.router.weight": random(EXPERTS, HIDDEN),
            f"{stem}mlp.router.bias": random(EXPERTS),
            f"{stem}mlp.experts.linear_fc1.weight": random(EXPERTS, 2 * INNER, HIDDEN),
            f"{stem}mlp.experts.linear_fc1.bias": random(EXPERTS, 2 * INNER),
            f"{stem}mlp.experts.linear_fc2.weight": random(EXPERTS, HIDDEN, INNER),
            f"{stem}mlp.experts.linear_fc2.bias": random(EXPERTS, HIDDEN),
        }
    return tensors | {
        "decoder.final_layernorm.weight": random(HIDDEN),
        "output_layer.weight": random(VOCAB, HIDDEN),
    }


def of_rank(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Of two tensor-parallel ranks, in the order of Transformer Engine's modules; experts are whole on both."""
    held = {"embedding.word_embeddings.weight": rows(tensors["embedding.word_embeddings.weight"], rank)}
    for layer in range(2):
        stem = f"decoder.layers.{layer}."
        attention, experts = f"{stem}self_attention.", f"{stem}mlp.experts."
        held |= {
            f"{attention}core_attention.softmax_offset": rows(
                tensors[f"{attention}core_attention.softmax_offset"], rank
            ),
            f"{attention}linear_proj.weight": columns(tensors[f"{attention}linear_proj.weight"], rank),
            f"{attention}linear_proj.bias": tensors[f"{attention}linear_proj.bias"],
            f"{attention}linear_qkv.layer_norm_weight": tensors[f"{stem}input_layernorm.weight"],
            f"{attention}linear_qkv.weight": rows(tensors[f"{attention}linear_qkv.weight"], rank),
            f"{attention}linear_qkv.bias": rows(tensors[f"{attention}linear_qkv.bias"], rank),
            f"{stem}pre_mlp_layernorm.weight": tensors[f"{stem}pre_mlp_layernorm.weight"],
            f"{stem}mlp.router.weight": tensors[f"{stem}mlp.router.weight"],
            f"{stem}mlp.router.bias": tensors[f"{stem}mlp.router.bias"],
        }
        for leaf in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias"):
            held |= {f"{experts}{leaf}{expert}": tensors[experts + leaf][expert].clone() for expert in range(EXPERTS)}
    return held | {
        "decoder.final_layernorm.weight": tensors["decoder.final_layernorm.weight"],
        "output_layer.weight": rows(tensors["output_layer.weight"], rank),
    }


def save(folder: Path, **changes: Any) -> dict[str, Tensor]:
    tensors = whole()
    args = arguments(tensor_model_parallel_size=2, **{**ARGS, **changes})
    for rank in range(2):
        save_rank(folder, f"mp_rank_{rank:02d}", {"args": args, "model": of_rank(tensors, rank)})
    return tensors


def test_the_arguments_of_the_public_scripts_are_a_gpt_oss(tmp_path, host) -> None:
    tensors = save(tmp_path)
    reader = open_checkpoint(tmp_path, host)
    assert {name.removeprefix("model.") for name in reader.shapes()} == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(reader.read(f"model.{name}"), tensor), name
    model: Any = config_from_dict({"model": reader.metadata["config"]["model"]}, host).model
    assert (model.family, model.activation) == ("gpt_oss", "clamped_swiglu")
    assert [model.window_of(layer) for layer in range(2)] == [4, None]
    assert (model.rope_scaling_type, model.rope_scaling_factor, model.rope_truncate) == ("yarn", 32.0, False)
    assert (model.original_max_position_embeddings, model.max_position_embeddings) == (4096, 131072)
    assert reader.metadata["megatron"]["unknown_arguments"] == []


def test_ranks_that_are_written_hold_these_slices_in_this_order(tmp_path, host) -> None:
    tensors = save(tmp_path / "a")
    source = open_checkpoint(tmp_path / "a", host)
    asked = ConvertOptions(
        target_tensor_parallel_size=2, target_expert_tensor_parallel_size=1, make_vocab_size_divisible_by=4
    )
    host[CHECKPOINT_SAVERS].get("megatron").convert.load()(tmp_path / "b", source, asked, host)
    for rank in range(2):
        expected, found = of_rank(tensors, rank), written_model(tmp_path / f"b/iter_0000005/mp_rank_{rank:02d}")
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_the_arguments_that_are_written_are_those_that_were_read(tmp_path, host) -> None:
    """From our configuration alone, without the arguments that a Megatron checkpoint carried."""
    save(tmp_path / "a")
    source = open_checkpoint(tmp_path / "a", host)
    del source.metadata["megatron"]
    args = through("megatron", source, options(), tmp_path / "b", host).metadata["megatron"]["args"]
    for name, given in ARGS.items():
        if name not in ("moe_grouped_gemm", "expert_tensor_parallel_size"):
            assert args[name] == (list(given) if isinstance(given, tuple) else given), name


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"softmax_type": "off-by-one"}, ConfigError, "softmax_type='off-by-one' stands for a softmax with a sink"),
        ({"activation_func_clamp_value": 5.0}, ConfigError, "activation_func_clamp_value=5.0 is not .* can be 7.0"),
        ({"glu_linear_offset": 0.0}, ConfigError, "glu_linear_offset=0.0 is not read of a model with attention sinks"),
        ({"quick_geglu": False, "swiglu": True}, ConfigError, "swiglu=True is not read"),
        ({"add_bias_linear": False}, ConfigError, "add_bias_linear=False is not read"),
        ({"num_experts": None}, ConfigError, "softmax_type='learnable' is read of mixtures of experts; num_experts"),
        ({"position_embedding_type": "none"}, ConfigError, "position_embedding_type='none' is not read; .* rope, yarn"),
        ({"mscale": 0.7}, ConfigError, "mscale=0.7 with mscale_all_dim=0 is not read; both have to be above 0"),
        ({"yarn_beta_fast": None}, CheckpointError, "its args do not have yarn_beta_fast"),
        ({"window_size": (3, 2)}, ConfigError, r"window_size=\(3, 2\) is not read; it can be \(left, 0\)"),
        ({"window_attn_skip_freq": [1, 0, 1]}, ConfigError, "an entry for each of the 2 layers"),
        ({"window_attn_skip_freq": 0}, ConfigError, "window_attn_skip_freq=0 is not read; it can be None, a number"),
        ({"enable_gpt_oss": True}, ConfigError, "enable_gpt_oss=True stands for positions that ModelOpt's scripts"),
    ],
)
def test_models_with_sinks_that_are_not_read(changes, error, words, tmp_path, host) -> None:
    save(tmp_path, **changes)
    with pytest.raises(error, match=words):
        open_checkpoint(tmp_path, host)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megatron", "megatron-dist"])
def test_from_hugging_face_and_back_verified(name, tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS["gpt_oss"], host, dtype=torch.bfloat16)
    through("hf", source, options(), tmp_path / "hf", host)
    convert(tmp_path / "hf", tmp_path / name, saver=name, options=options(2, 2, ep=2), verify=True, host=host)
    convert(tmp_path / name, tmp_path / "again", saver="hf", verify=True, host=host)
    assert_same_tensors(open_with(host[CHECKPOINT_LOADERS].get("hf"), tmp_path / "again", host), source)


# -- windows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "skipped", "expected"),
    [
        (None, 2, [None] * 4),
        ((3, 0), None, [4] * 4),
        ((3, 0), 2, [4, None, 4, None]),
        ((3, -1), 3, [4, 4, None, 4]),
        ((3, 0), 1, [None] * 4),
        ((3, 0), [0, 1, 1, 0], [None, 4, 4, None]),
        ((3, 0), "([0]*3+[1])", [None, None, None, 4]),
        ((-1, 0), None, [None] * 4),
        ((0, 0), None, [1] * 4),
    ],
)
def test_the_window_of_each_layer(window, skipped, expected) -> None:
    """Megatron counts layers from 1: those whose number n divides have none, of a list those with a 0."""
    args = Arguments({"window_size": window, "window_attn_skip_freq": skipped}, Path("rank"))
    assert windows_of(args, 4) == expected


@pytest.mark.parametrize(("model", "words"), [("mistral", "every layer needs"), ("qwen2", "all others have it")])
def test_windows_in_layers_where_the_family_has_none(model, words, tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS[model], host)
    through("megatron", source, options(), tmp_path, host)
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(next(tmp_path.rglob("*.pt")), weights_only=True)
    content["args"].window_size, content["args"].window_attn_skip_freq = (8, 0), [1, 0, 1, 1]
    torch.save(content, next(tmp_path.rglob("*.pt")))
    with pytest.raises(ConfigError, match=rf"window_size=\(8, 0\) with window_attn_skip_freq=\[1, 0, 1, 1\] .*{words}"):
        open_checkpoint(tmp_path, host)


# -- YaRN --------------------------------------------------------------------------------------------


def megatron_yarn(args: dict[str, Any]) -> tuple[list[float], float]:
    """Frequencies and the factor on queries and keys, by the formulas of Megatron-Core's YarnRotaryEmbedding."""
    size, base, factor = args["kv_channels"], args["rotary_base"], args["rotary_scaling_factor"]
    original = args["yarn_original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(args["yarn_beta_fast"]), channel(args["yarn_beta_slow"])
    if args["yarn_correction_range_round_to_int"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    frequencies = []
    for pair in range(size // 2):
        kept = 1 - min(max((pair - low) / (high - low), 0), 1)
        plain = base ** (-2 * pair / size)
        frequencies.append(plain / factor * (1 - kept) + plain * kept)
    one, all_dim = (0.1 * args[key] * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim"))
    return frequencies, one / all_dim


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("mscales", [(1.0, 0.0), (0.8, 0.5)])
def test_yarn_means_what_megatron_computes(rounded, mscales, host) -> None:
    args = {**ARGS, "kv_channels": 32, "yarn_correction_range_round_to_int": rounded}
    args |= dict(zip(("mscale", "mscale_all_dim"), mscales, strict=True))
    section = {**MODELS["llama"], "kv_channels": 32, "rotary_base": 150000.0, **yarn_section(Arguments(args, Path()))}
    rotary: Any = build_rotary(config_from_dict({"model": section}, host).model)  # type: ignore[arg-type]
    frequencies, factor = megatron_yarn(args)
    torch.testing.assert_close(rotary.frequencies, torch.tensor(frequencies), rtol=1e-6, atol=0)
    assert rotary.scale == pytest.approx(factor, rel=1e-12)
