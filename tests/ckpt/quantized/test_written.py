"""`mt convert --quantize`: what is written, read back, is the weights rounded by the formula of the format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mt_ckpt.convert import convert
from mt_ckpt.hugging_face.reader import open_checkpoint
from mt_ckpt.quantized.quantizer import ROW_MULTIPLE, encode
from mt_ckpt.quantized.schemes import FIXED, GROUPED, quantizer_named
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost

# Widths that groups of 32 divide, and blocks of 128 do not.
LLAMA = {"family": "llama", "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
LLAMA |= {"ffn_hidden_size": 160, "max_position_embeddings": 64, "vocab_size": 64}
QKV = "model.layers.0.self_attn"
Write = Callable[..., Path]


@pytest.fixture
def write(make_model, host: PluginHost, tmp_path: Path, without_waiting_for_the_disk: None) -> Write:
    """A function that converts a model with a scheme; the unquantized folder is beside the result as `plain`."""

    def run(scheme: str, *, dtype: torch.dtype = torch.bfloat16, **options: object) -> Path:
        source = make_model(dtype=dtype, **LLAMA)
        convert(source, tmp_path / "plain", saver="hf", host=host)
        chosen = ConvertOptions(quantize=scheme, **options)  # type: ignore[arg-type]
        convert(source, tmp_path / "out", saver="hf", options=chosen, host=host)
        return tmp_path / "out"

    return run


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def values(folder: Path, host: PluginHost) -> dict[str, Tensor]:
    reader = open_checkpoint(folder, host)
    return {name: reader.read(name).float() for name in reader.shapes()}


# -- references: one number after another, by the definition of the format ---------------------------------------


def nearest(value: float, numbers: np.ndarray) -> float:
    return float(numbers[np.abs(numbers - value).argmin()])


def e4m3(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).float()


# Numbers of even codes first: of two that are as near, the first is taken.
E2M1 = np.array([0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0])
E2M1 = np.concatenate([E2M1[:4], -E2M1[:4], E2M1[4:], -E2M1[4:]])


def rounded_groups(weight: Tensor, size: int, round_group: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([round_group(group) for group in weight.float().reshape(-1, size)]).reshape(weight.shape)


def int4(group: Tensor) -> Tensor:
    scale = (group.abs().max() / 7.5).to(torch.bfloat16).float()
    return (group / scale).round().clamp(-8, 7) * scale


def int4_with_zero(group: Tensor) -> Tensor:
    low, high = min(group.min().item(), 0.0), max(group.max().item(), 0.0)
    scale = torch.tensor((high - low) / 15).to(torch.bfloat16).float()
    zero = (-low / scale).round()
    return ((group / scale + zero).round().clamp(0, 15) - zero) * scale


def mxfp4(group: Tensor) -> Tensor:
    largest = group.abs().max().item()
    exponent = np.floor(np.log2(largest)) + (largest / 2 ** np.floor(np.log2(largest)) >= 1.75) - 2
    return torch.tensor([nearest(x / 2.0**exponent, E2M1) * 2.0**exponent for x in group.tolist()])


def block(group: Tensor) -> Tensor:
    scale = group.abs().max() / 448
    return e4m3(group / scale) * scale


REFERENCES = {
    "w4a16-g32": lambda weight: rounded_groups(weight, 32, int4),
    "w4a16-asym-g32": lambda weight: rounded_groups(weight, 32, int4_with_zero),
    "gptq-g32": lambda weight: rounded_groups(weight, 32, int4),
    "awq-g32": lambda weight: rounded_groups(weight, 32, int4_with_zero),
    "mxfp4": lambda weight: rounded_groups(weight, 32, mxfp4),
    "fp8-blocks": lambda weight: torch.cat([block(rows) for rows in weight.float().split(128)]),  # 64 columns
    "fp8": lambda weight: torch.stack([e4m3(row / s) * s for row in weight.float() for s in [row_scale(row)]]),
}


def row_scale(row: Tensor) -> Tensor:
    return (row.abs().max() / 448).to(torch.bfloat16).float()


@pytest.mark.parametrize("scheme", REFERENCES)
def test_weights_are_rounded_by_the_formula(scheme: str, write: Write, host: PluginHost) -> None:
    folder = write(scheme)
    name = "model.decoder.layers.1.mlp.linear_fc1.weight"  # 320 rows, 64 columns
    plain, made = values(folder.parent / "plain", host), values(folder, host)
    halves = [REFERENCES[scheme](half) for half in plain[name].chunk(2)]  # gate and up are weights of their own
    # A value that is read is rounded to bf16 once more.
    assert torch.equal(made[name], torch.cat(halves).to(torch.bfloat16).float())


ERRORS = {
    "fp8-blocks": 0.03, "fp8-blocks-ue8m0": 0.03, "fp8": 0.03, "int8": 0.008, "nvfp4": 0.1, "mxfp4": 0.12,
    "mxfp8": 0.03,
    "w4a16": 0.1, "w4a16-asym": 0.1, "w8a16": 0.01, "awq": 0.1, "gptq": 0.1, "gptq-8bit": 0.01,
    "mlx-2bit": 0.37, "mlx-3bit": 0.2, "mlx-4bit": 0.1, "mlx-5bit": 0.04, "mlx-6bit": 0.02, "mlx-8bit": 0.01,
}  # fmt: skip


def test_every_scheme_has_an_error_to_stay_below() -> None:
    assert set(ERRORS) == {*FIXED, *GROUPED}


@pytest.mark.parametrize("scheme", ERRORS)
def test_every_scheme_is_read_back_close_to_the_weights(scheme: str, write: Write, host: PluginHost) -> None:
    folder = write(f"{scheme}-g32" if scheme in GROUPED else scheme, dtype=torch.float32)
    plain, made = values(folder.parent / "plain", host), values(folder, host)
    assert list(plain) == list(made)
    for name, weight in plain.items():
        error = (made[name] - weight).norm() / weight.norm()
        assert error < ERRORS[scheme] if "linear_" in name and weight.ndim == 2 else error == 0, name


def test_what_stays_is_named_in_the_configuration(write: Write) -> None:
    config = json.loads((write("w4a16-g32") / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32


def test_experts_are_quantized_and_routers_are_not(make_model, host: PluginHost, tmp_path: Path) -> None:
    moe = {
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_router_load_balancing_type": ["aux_loss"],
    }
    moe |= {"moe_aux_loss_coeff": [0.01]}
    model = {**LLAMA, "family": "mixtral", "moe": moe}
    source = make_model(dtype=torch.bfloat16, **model)
    convert(source, tmp_path / "out", saver="hf", options=ConvertOptions(quantize="fp8-blocks"), host=host)
    tensors, config = stored(tmp_path / "out"), json.loads((tmp_path / "out/config.json").read_text())
    left = config["quantization_config"]["modules_to_not_convert"]
    routers = [name for name in tensors if name.endswith("gate.weight")]
    assert routers
    assert {name.removesuffix(".weight") for name in routers} | {"lm_head"} == set(left)
    experts = [name for name in tensors if ".experts." in name and name.endswith(".weight")]
    assert len(experts) == 2 * 4 * 3
    assert all(tensors[name].dtype == torch.float8_e4m3fn and f"{name}_scale_inv" in tensors for name in experts)
    assert set(open_checkpoint(tmp_path / "out", host).shapes()) == set(open_native(source).shapes())


def open_native(path: Path):
    from mt_ckpt.native.read import open_checkpoint as open_own

    return open_own(path)


def test_what_readers_fuse_has_one_global_scale(write: Write) -> None:
    tensors = stored(write("nvfp4"))
    scales = [tensors[f"{QKV}.{part}_proj.weight_global_scale"].item() for part in "qkv"]
    assert len(set(scales)) == 1
    assert scales[0] != tensors[f"{QKV}.o_proj.weight_global_scale"].item()


@pytest.mark.usefixtures("forked_workers")
def test_several_processes_and_shards_write_the_same(make_model, host: PluginHost, tmp_path: Path) -> None:
    source = make_model(dtype=torch.bfloat16, **LLAMA)
    for name, nproc in (("one", 1), ("two", 2)):
        options = ConvertOptions(quantize="w4a16-asym-g32", max_shard_size=20_000)
        convert(source, tmp_path / name, saver="hf", options=options, nproc=nproc, host=host)
    files = sorted(file.name for file in (tmp_path / "one").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize("scheme", ["fp8-blocks", "w4a16-asym-g32", "awq-g32", "gptq-g32", "nvfp4", "mlx-3bit-g32"])
def test_rows_are_quantized_in_slices(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(3 * ROW_MULTIPLE + 40, 64, generator=torch.Generator().manual_seed(1))
    quantizer = quantizer_named(scheme)
    whole = encode(quantizer, weight)
    monkeypatch.setattr("mt_ckpt.quantized.quantizer.SLICE", 1)
    sliced = encode(quantizer, weight)
    for name, part in whole.items():
        assert torch.equal(part.view(torch.uint8), sliced[name].view(torch.uint8)), name


@pytest.mark.parametrize("scheme", [*FIXED, *GROUPED])
def test_zeros_stay_zeros(scheme: str) -> None:
    parts = encode(quantizer_named(scheme), torch.zeros(128, 128, dtype=torch.bfloat16))
    for name, part in parts.items():
        if part.dtype.is_floating_point:
            assert part.float().isfinite().all(), name


# -- refused ------------------------------------------------------------------------------------------------------


def refused(source: Path, scheme: str, host: PluginHost, saver: str = "hf", **keys: object) -> str:
    with pytest.raises(ConfigError) as info:
        convert(source, source.parent / "out", saver=saver, options=ConvertOptions(quantize=scheme), host=host, **keys)  # type: ignore[arg-type]
    assert not (source.parent / "out").exists()
    return str(info.value)


def test_what_cannot_be_written_is_refused_before_anything_is(make_model, host: PluginHost) -> None:
    source = make_model(**LLAMA)
    assert "it can be fp8-blocks, " in refused(source, "q4", host)
    assert "its 64 columns are no multiple of 128; schemes with groups" in refused(source, "w4a16", host)
    assert "the format megatron has no schemes" in refused(source, "fp8", host, saver="megatron")
    assert "--verify compares bit for bit" in refused(source, "fp8", host, verify=True)


def test_matrices_that_are_no_linear_layers_are_refused(make_model, host: PluginHost) -> None:
    gpt2 = {key: LLAMA[key] for key in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")}
    message = refused(make_model(family="gpt", max_position_embeddings=64, activation="gelu_tanh", **gpt2), "fp8", host)
    assert "it is stored [in, out] there" in message
