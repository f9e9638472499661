"""Training with rounded weights: gradients pass straight through, and what is exported computes the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mt_ckpt.convert import convert
from mt_ckpt.model import build_model, model_config
from mt_ckpt.native.save import save_checkpoint
from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.config.loading import config_from_dict
from mt_core.errors import ConfigError
from mt_core.nn.layout import parameter_layouts
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.nn.main_grad import attach_main_grad
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train.checkpoint.state import MODEL, load_parameters
from mt_tools.verify.comparison import Tolerances, compare
from mt_tools.verify.run_record import record
from mt_tune.quantized_training.rounding import InputRounding, WeightRounding
from mt_tune.quantized_training.transform import RoundedMultiply, scheme_named

LLAMA: dict[str, Any] = {
    "family": "llama", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
    "ffn_hidden_size": 64, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_router_load_balancing_type": ["aux_loss"],
    "moe_aux_loss_coeff": [0.01],
}  # fmt: skip


def linear(scheme: str, dtype: torch.dtype = torch.float32) -> ColumnParallelLinear:
    ctx = ParallelContext(params_dtype=dtype)
    layer = ColumnParallelLinear(32, 8, ctx, bias=False, init=lambda x, g: x.normal_(generator=g))
    with torch.no_grad():
        layer.weight.copy_(torch.randn(8, 32, generator=torch.Generator().manual_seed(2)))
    named = scheme_named(scheme)
    inputs = None if named.input_grid is None else InputRounding(layer, named.input_grid)
    layer.multiply = RoundedMultiply(layer.multiply, WeightRounding("linear.weight", layer, named), inputs)
    return layer


def int4(weight: Tensor) -> Tensor:
    groups = weight.unflatten(1, (-1, 16))
    scale = groups.abs().amax(-1, keepdim=True) / 7.5
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)


def int8_rows(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(-1, keepdim=True) / 127.5
    return (rows / scale).round().clamp(-128, 127) * scale


def test_gradients_are_those_of_the_formula() -> None:
    layer, x = linear("w4a16-g16"), torch.randn(2, 5, 32, requires_grad=True)
    out = layer(x)
    rounded = int4(layer.weight.detach())
    assert torch.equal(out, F.linear(x, rounded))
    upstream = torch.randn_like(out)
    out.backward(upstream)
    # dL/dW as if W were what was multiplied; dL/dx by the rounded weight.
    assert torch.allclose(layer.weight.grad, torch.einsum("bso,bsi->oi", upstream, x.detach()))
    assert torch.allclose(x.grad, upstream @ rounded)


def test_inputs_are_rounded_token_by_token() -> None:
    layer, x = linear("int8"), torch.randn(2, 5, 32, requires_grad=True)
    out = layer(x)
    rounded, inputs = int8_rows(layer.weight.detach()), int8_rows(x.detach())
    assert torch.allclose(out, F.linear(inputs, rounded), atol=1e-6)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    assert torch.allclose(layer.weight.grad, torch.einsum("bso,bsi->oi", upstream, inputs), atol=1e-5)
    assert torch.allclose(x.grad, upstream @ rounded, atol=1e-5)


def test_gradients_go_to_the_main_gradient() -> None:
    layer = linear("nvfp4", torch.bfloat16)
    total = torch.zeros(8, 32)
    assert attach_main_grad(layer.weight, total) is not None
    x = torch.randn(2, 5, 32, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    out.backward(torch.ones_like(out))
    assert layer.weight.grad is None
    assert torch.allclose(total, x.detach().float().sum((0, 1)).expand(8, 32), atol=1e-4)


def saved(path: Path, dtype: torch.dtype, scheme: str, **model: Any) -> Path:
    host = load_plugins()
    sections = {"model": {**LLAMA, **model}, "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 101}}
    config = config_from_dict({**sections, "quantize": {"scheme": scheme}}, host)
    layouts = parameter_layouts(build_model(config, host, "meta"))
    generator = torch.Generator().manual_seed(5)
    state = {MODEL + name: torch.randn(own.shape, generator=generator).to(dtype) for name, own in layouts.items()}
    save_checkpoint(path, state.items(), {"iteration": 1, "config": config.to_dict()}, {})
    return path


@torch.no_grad()
def logits_of(path: Path, dtype: torch.dtype) -> Tensor:
    host = load_plugins()
    reader = open_checkpoint(path, host)
    model: nn.Module = build_model(model_config(reader, host), host).eval().to(dtype)
    load_parameters(model.named_parameters(), reader, parameter_layouts(model), MODEL, ParallelContext())
    tokens = torch.randint(0, 101, (2, 16), generator=torch.Generator().manual_seed(7))
    return model(tokens)  # type: ignore[no-any-return]


SCHEMES = ("w4a16-g16", "w4a16-asym-g16", "w8a16-g32", "nvfp4", "mxfp4", "mxfp8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_exported_computes_the_same_bits(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", dtype, scheme)
    convert(source, tmp_path / "out", saver="hf", options=ConvertOptions(quantize=scheme), host=load_plugins())
    assert torch.equal(logits_of(source, dtype), logits_of(tmp_path / "out", dtype))


def test_experts_are_exported_as_they_were_multiplied(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", torch.float32, "nvfp4", family="mixtral", moe=MOE)
    convert(source, tmp_path / "out", saver="hf", options=ConvertOptions(quantize="nvfp4"), host=load_plugins())
    assert torch.equal(logits_of(source, torch.float32), logits_of(tmp_path / "out", torch.float32))


LAYOUTS = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "zero": {"use_distributed_optimizer": True},
    "pp": {"pipeline_model_parallel_size": 2},
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "scheme"),
    [
        ("tp", "w4a16-g16"),
        ("tp", "nvfp4"),
        ("zero", "nvfp4"),
        ("pp", "w4a16-g16"),
        # The other scheme where no matrix is divided.
        pytest.param("zero", "w4a16-g16", marks=pytest.mark.exhaustive),
        pytest.param("pp", "nvfp4", marks=pytest.mark.exhaustive),
    ],
)
def test_layouts_train_alike(scheme: str, layout: str) -> None:
    """1 s each: two ranks and one."""
    host = load_plugins()
    train = {"train_iters": 1, "micro_batch_size": 2, "global_batch_size": 4}
    tree = {
        "model": LLAMA,
        "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 101},
        "data": {"dataset_type": "mock", "seq_length": 16},
        "train": train,
        "quantize": {"scheme": scheme},
    }
    one = config_from_dict(tree, host)
    two = config_from_dict({**tree, "parallel": LAYOUTS[layout]}, host)
    differences = compare(record(two, world=2, steps=1), record(one, world=1, steps=1), Tolerances())
    assert not [difference for difference in differences if difference.too_large]


def test_groups_that_a_layout_would_cut_are_refused() -> None:
    layer = linear("w4a16-g16")
    with pytest.raises(ConfigError, match="groups of 64 columns do not fit linear.weight, of which a rank has 32"):
        WeightRounding("linear.weight", layer, scheme_named("w4a16-g64"))


def test_schemes_that_round_in_their_own_way_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantize\.scheme=mlx-4bit is not trained with"):
        scheme_named("mlx-4bit")
