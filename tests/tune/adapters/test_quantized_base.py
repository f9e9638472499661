"""A frozen base in 4 or 8 bits: what it computes, its gradients, where it starts from, its memory."""

from __future__ import annotations

import json
from math import prod

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tune.adapters.models import InMemory, base_of, reader_of
from torch.overrides import TorchFunctionMode

from mt_ckpt.hugging_face.save import save_folder
from mt_ckpt.model import model_config
from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.layout import ParameterLayout, parameter_layouts, zeros
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train import Trainer
from mt_core.train.build import build_model
from mt_core.train.checkpoint.state import MODEL
from mt_moe.experts.loop import Groups, PermutingLoop
from mt_moe.permutation import RowKernels, RowOrder, sort_by
from mt_tools.plan.layouts import Planner
from mt_tools.plan.machines import get_machine
from mt_tune.adapters.merge import MergedCheckpoint, largest_logit_change
from mt_tune.adapters.quantized_base import quantized_weights
from mt_tune.adapters.quantized_reading import DenseCheckpoint, quantized_checkpoint
from mt_tune.quantized_weights.formats import NF4, NormalFloat, as_bytes, dynamic_map
from mt_tune.quantized_weights.weight import QuantizedWeight, quantized_product

LLAMA = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 128,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
LORA = {"type": "lora", "rank": 4, "alpha": 8.0}
BASES = {
    "nf4": {"base": "nf4"},
    "nf4 plain": {"base": "nf4", "base_double_quant": False},
    "int8": {"base": "int8"},
    "fp8": {"base": "fp8", "base_block_size": 32},
    "int4": {"base": "int4", "base_block_size": 16},
    "fp4": {"base": "fp4"},
}
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def host():
    return load_plugins()


@pytest.fixture(scope="module")
def base(host):
    return base_of(host, LLAMA)


def started(host, base, adapter):
    """The model of a run on this base, its adapter moved away from where it starts; and its configuration."""
    config = model_config(InMemory({**base.metadata["config"], "adapter": adapter}, {}), host)
    ctx = ParallelContext()
    model = build_model(config, ctx, host)
    layouts, reader = parameter_layouts(model), base
    if adapter.get("base", "none") != "none":
        reader = quantized_checkpoint(base, config, host)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adapter." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(layouts[name].to_local(reader.read(MODEL + name), ctx))
    return model, config


def outcome(model):
    logits = model.eval()(TOKENS)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", BASES)
def test_logits_and_gradients_are_those_on_the_dequantized_weights(host, base, name) -> None:
    model, config = started(host, base, {**LORA, **BASES[name]})
    dense = DenseCheckpoint(reader_of(model, config), config, host)
    plain, _ = started(host, InMemory(base.metadata["config"], {n[6:]: dense.read(n) for n in base.shapes()}), LORA)
    logits, gradients = outcome(model)
    expected, of_plain = outcome(plain)
    torch.testing.assert_close(logits, expected)
    assert gradients.keys() == of_plain.keys()
    for key, value in of_plain.items():
        torch.testing.assert_close(gradients[key], value, msg=key)
    error = max((dense.read(n) - base.read(n)).abs().max() / base.read(n).abs().max() for n in base.shapes())
    assert 0 < error < (0.05 if "8" in BASES[name]["base"] else 0.25)
    assert len(quantized_weights(model)) == 8


def test_products_that_permute_rows_themselves_have_the_gradients_of_dense_ones() -> None:
    """Those of Triton on a GPU: tokens to rows of experts, and back, each the reverse of the other."""
    keys = torch.tensor([1, 0, 2, 1, 0, 2, 2, 0])  # of 4 tokens two experts each, of 3
    order, groups = RowOrder(sort_by(keys, RowKernels()), 2), Groups(torch.bincount(keys, minlength=3))
    weight = QuantizedWeight(ParameterLayout((3, 6, 64), zeros), NormalFloat(64), ParallelContext())
    generator = torch.Generator().manual_seed(0)
    for part in weight.parts:
        weight.form.random(part.name, values := torch.zeros(3, 6, part.size), generator)
        with torch.no_grad():
            weight.get_parameter(part.name).copy_(as_bytes(values) if part.is_float else values)
    product, dense = quantized_product(PermutingLoop()), weight.dense(torch.float32)
    for name, rows, out in (("of_tokens", 4, 8), ("to_tokens", 8, 4)):
        x = torch.randn(rows, 64, generator=generator, requires_grad=True)
        grad = torch.randn(out, 6, generator=generator)
        found = getattr(product, name)(x, weight, groups, order)
        plain = getattr(PermutingLoop(), name)(x, dense, groups, order)
        torch.testing.assert_close(found, plain)
        ours, expected = (torch.autograd.grad(result, x, grad)[0] for result in (found, plain))
        torch.testing.assert_close(ours, expected)


# -- published folders --------------------------------------------------------------------------------

PUBLISHED = {
    "fp8-blocks": {"base": "fp8"},
    "fp8-blocks-ue8m0": {"base": "fp8", "base_block_size": 64},
    "fp8": {"base": "fp8"},
    "int8": {"base": "int8"},
    "w4a16-g32": {"base": "int4", "base_block_size": 32},
    "w4a16-asym-g32": {"base": "int4", "base_block_size": 16},
    "awq-g32": {"base": "int4", "base_block_size": 32},
    "gptq-g32": {"base": "int4", "base_block_size": 16},
    "nvfp4": {"base": "fp4", "base_block_size": 16},
    "mxfp4": {"base": "fp4"},
}


def quantized_run(host, reader, adapter):
    config = model_config(InMemory({**reader.metadata["config"], "adapter": adapter}, {}), host)
    return quantized_checkpoint(reader, config, host), config


@pytest.mark.parametrize("scheme", PUBLISHED)
def test_a_published_folder_is_kept_bit_for_bit(host, base, tmp_path, scheme) -> None:
    """Readers of the folder dequantize it; so does the base that is held, from the same codes and scales."""
    folder = tmp_path / "folder"
    save_folder(folder, InMemory({"model": LLAMA}, _bf16(base)), ConvertOptions(quantize=scheme), host)
    reader = open_checkpoint(folder, host)
    held, config = quantized_run(host, reader, {**LORA, **PUBLISHED[scheme]})
    held.metadata = {"config": {**config.to_dict(), "precision": {"dtype": "bf16"}}}
    dense = DenseCheckpoint(held, config, host)
    assert {name for name in reader.shapes() if not torch.equal(dense.read(name), reader.read(name))} == set()


def rewritten(folder, rename, quantization: dict[str, object]) -> None:
    """A folder in another format with the same codes. rename: (name, tensor) -> the same in the other format."""
    tensors = load_file(folder / "model.safetensors")
    save_file(dict(rename(*item) for item in tensors.items()), folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    del content["quantization_config"]
    (folder / "config.json").write_text(json.dumps({**content, **quantization}))
    for record in folder.glob("*checksums*"):
        record.unlink()


def of_modelopt(name, tensor):
    if name.endswith("weight_global_scale"):
        return name.replace("weight_global_scale", "weight_scale_2"), 1.0 / tensor
    return name.replace("weight_packed", "weight"), tensor


def of_mlx(name, tensor):
    if name.endswith("weight_packed"):
        return name.replace("weight_packed", "weight"), tensor.view(torch.uint32)
    return name.replace("weight_scale", "scales"), tensor


FP4_FOLDERS = {
    "modelopt": (
        "nvfp4",
        of_modelopt,
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}},
        {"base": "fp4", "base_block_size": 16},
    ),
    "mlx": ("mxfp4", of_mlx, {"quantization": {"mode": "mxfp4", "group_size": 32, "bits": 4}}, {"base": "fp4"}),
}


@pytest.mark.parametrize("name", FP4_FOLDERS)
def test_four_bit_floats_of_other_formats_are_kept(host, base, tmp_path, name) -> None:
    scheme, rename, quantization, adapter = FP4_FOLDERS[name]
    folder = tmp_path / "folder"
    save_folder(folder, InMemory({"model": LLAMA}, _bf16(base)), ConvertOptions(quantize=scheme), host)
    rewritten(folder, rename, quantization)
    reader = open_checkpoint(folder, host)
    held, config = quantized_run(host, reader, {**LORA, **adapter})
    held.metadata = {"config": {**config.to_dict(), "precision": {"dtype": "bf16"}}}
    dense = DenseCheckpoint(held, config, host)
    assert {n for n in reader.shapes() if not torch.equal(dense.read(n).float(), reader.read(n).float())} == set()


def test_gptq_in_an_order_of_its_own_is_refused(host, base, tmp_path) -> None:
    folder = tmp_path / "folder"
    save_folder(folder, InMemory({"model": LLAMA}, _bf16(base)), ConvertOptions(quantize="gptq-g32"), host)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensor.flip(0) for name, tensor in tensors.items() if name.endswith("g_idx")}
    save_file(tensors, folder / "model.safetensors")
    for record in folder.glob("*checksums*"):
        record.unlink()
    reader = open_checkpoint(folder, host)
    with pytest.raises(ConfigError, match="desc_act"):
        read_all(quantized_run(host, reader, {**LORA, "base": "int4", "base_block_size": 32})[0])
    read_all(quantized_run(host, reader, {**LORA, "base": "int4", "base_requantize": True})[0])


def _bf16(base):
    return {name[6:]: value.bfloat16() for name, value in base.values.items()}


def bitsandbytes_folder(folder, host, base, *, double: bool) -> None:
    """What bitsandbytes saves of an nf4 model: its tensors, made of our codes. tests/peer asks the package itself."""
    save_folder(folder, InMemory({"model": LLAMA}, _bf16(base)), ConvertOptions(), host)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        parts = NormalFloat(64, double).quantize(tensors[name].float())
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
        tensors |= {name: parts["codes"].reshape(-1, 1), f"{name}.absmax": parts["scales"].flatten()}
        tensors[f"{name}.quant_map"] = torch.tensor(NF4)
        if double:
            state |= {
                "nested_blocksize": 256,
                "nested_dtype": "float32",
                "nested_offset": parts["scale_offset"][0].item(),
            }
            # At most 256 blocks in each of these matrices.
            tensors |= {f"{name}.nested_absmax": parts["nested_scales"].reshape(-1)[:1].clone()}
            tensors |= {f"{name}.nested_quant_map": dynamic_map()}
        encoded = json.dumps(state).encode()
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(encoded), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    for record in folder.glob("*checksums*"):
        record.unlink()


@pytest.mark.parametrize("double", [True, False])
def test_nf4_of_bitsandbytes_is_kept_bit_for_bit(host, base, tmp_path, double) -> None:
    folder = tmp_path / "folder"
    bitsandbytes_folder(folder, host, base, double=double)
    reader = open_checkpoint(folder, host)
    held, config = quantized_run(host, reader, {**LORA, "base": "nf4", "base_double_quant": double})
    held.metadata = {"config": {**config.to_dict(), "precision": {"dtype": "bf16"}}}
    dense = DenseCheckpoint(held, config, host)
    assert {name for name in reader.shapes() if not torch.equal(dense.read(name), reader.read(name))} == set()
    with pytest.raises(ConfigError, match=f"adapter.base_double_quant={str(double).lower()}"):
        read_all(quantized_run(host, reader, {**LORA, "base": "nf4", "base_double_quant": not double})[0])
    with pytest.raises(ConfigError, match="as nf4.*adapter.base_requantize=true"):
        read_all(quantized_run(host, reader, {**LORA, "base": "int8"})[0])
    read_all(quantized_run(host, reader, {**LORA, "base": "int8", "base_requantize": True})[0])


def read_all(reader) -> None:
    for name in reader.shapes():
        reader.read(name)


# -- runs ------------------------------------------------------------------------------------------------

SETTINGS = (
    "data.seq_length=16", "data.corpus_bytes=1000000", "train.micro_batch_size=2", "train.global_batch_size=2",
    "train.eval_interval=null", "train.eval_iters=1", "lr_schedule.lr_warmup_iters=0", "logging.progress=none",
    "train.sample_prompt=null", "checkpoint.save_interval=2", "train.deterministic=true", "train.train_iters=4",
    "adapter.type=lora", "adapter.rank=3", "adapter.dropout=0.2", "adapter.base=nf4",
)  # fmt: skip
SMALL = {**LLAMA, "num_layers": 1, "vocab_size": 263, "max_position_embeddings": 16}


def train(host, base, run_dir, steps, *more):
    settings = [*SETTINGS, *(f"model.{key}={value}" for key, value in SMALL.items()), f"checkpoint.load={base}", *more]
    config = load_config(overrides=[*settings, f"train.exit_iteration={steps}"], host=host)
    trainer = Trainer(config, run_dir=run_dir, host=host)
    trainer.train()
    return trainer, open_checkpoint(find_checkpoint(run_dir), host)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_goes_on_elsewhere_and_is_merged(host, tmp_path) -> None:
    folder = tmp_path / "base"
    save_folder(folder, base_of(host, SMALL), ConvertOptions(), host)
    _, whole = train(host, folder, tmp_path / "whole", 4)
    train(host, folder, tmp_path / "cut", 2)
    _, cut = train(host, folder, tmp_path / "cut", 4)
    names = [name for name in whole.shapes() if not name.startswith("rng.")]
    assert all(torch.equal(whole.read(name), cut.read(name)) for name in names)
    assert "model.decoder.layers.0.mlp.linear_fc1.weight.codes" in names
    merged = MergedCheckpoint(whole, host)
    assert merged.shapes().keys() == open_checkpoint(folder, host).shapes().keys()
    assert largest_logit_change(whole, merged, host) < 1e-5
    # A run starts from the run, whose codes are taken as they are.
    _, again = train(host, tmp_path / "whole", tmp_path / "again", 0 + 1, "optimizer.lr=0.0")
    assert all(torch.equal(whole.read(n), again.read(n)) for n in names if ".weight." in n and n.startswith("model."))
    with pytest.raises(ConfigError, match="held with base=nf4"):
        train(host, tmp_path / "whole", tmp_path / "other", 1, "adapter.base=int4", "adapter.base_block_size=64")


def test_memory_is_that_of_the_codes(host) -> None:
    """As planned, and as allocated: a dense matrix is never there, neither while the model is built nor held."""
    keys = [f"model.{key}={value}" for key, value in {**LLAMA, "ffn_hidden_size": 4096}.items()]
    config = load_config(overrides=[*SETTINGS, *keys], host=host).config
    largest: list[int] = []

    class Allocations(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if func is torch.empty and not found.is_meta:
                largest.append(found.numel() * found.element_size())
            return found

    with Allocations():
        model = build_model(config, ParallelContext(), host)
    weights = quantized_weights(model)
    dense = sum(prod(weight.layout.shape) for weight in weights.values())
    held = sum(p.numel() * p.element_size() for weight in weights.values() for p in weight.parameters())
    assert held < 0.61 * dense  # bytes a number: 0.5, and scales, few of which belong to rows of 64 numbers
    assert max(largest) <= dense // 2
    cost = weight_cost_of(config, host)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert cost == pytest.approx(parameters, rel=0.01)


def weight_cost_of(config, host) -> float:
    return Planner(config, host, get_machine("h100")).plan(config, 1).largest.weights.weights
