"""The formats within `mt convert`: verified, from and to the other formats, and within the bound on memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.ckpt.megatron.conftest import LLAMA, MODELS, MOE_MODELS, RandomCheckpoint, assert_same_tensors
from tests.ckpt.megatron.test_round_trip import options, through
from tests.covering import covering

from mt_ckpt.convert import convert
from mt_core.checkpoint_lookup import open_with
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks

FORMATS = ["megatron", "megatron-dist", "megatron-legacy"]


@pytest.mark.parametrize("name", FORMATS)
def test_from_our_format_and_back_verified(name, tmp_path, host) -> None:
    """--verify compares every bit, and the logits of both configurations."""
    source = RandomCheckpoint(LLAMA, host)
    through("mt", source, options(), tmp_path / "mt", host)
    there = convert(tmp_path / "mt", tmp_path / name, saver=name, options=options(2), verify=True, host=host)
    assert there.num_tensors == len(source.tensors)
    back = convert(tmp_path / name, tmp_path / "back", saver="mt", verify=True, host=host)
    assert back.num_parameters == there.num_parameters
    assert_same_tensors(open_with(host[CHECKPOINT_LOADERS].get("mt"), tmp_path / "back", host), source)


@pytest.mark.parametrize("name", FORMATS)
def test_from_hugging_face_and_back(name, tmp_path, host) -> None:
    """A Llama stays one: its configuration is found again in Megatron's arguments."""
    source = RandomCheckpoint({**LLAMA, "vocab_size": 101}, host, dtype=torch.bfloat16)
    through("hf", source, options(), tmp_path / "hf", host)
    convert(tmp_path / "hf", tmp_path / name, saver=name, options=options(2, 2), host=host)
    convert(tmp_path / name, tmp_path / "again", saver="hf", host=host)
    assert_same_tensors(open_with(host[CHECKPOINT_LOADERS].get("hf"), tmp_path / "again", host), source)


FAMILIES = (*MOE_MODELS, "llama_yarn", "qwen2_windows", "latent_dense", "mamba", "hybrid")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), covering(FAMILIES, ["megatron", "megatron-dist"]))
def test_the_arguments_compute_what_the_configuration_does(model, name, tmp_path, host) -> None:
    """--verify: the model that Megatron's arguments describe has the same logits, bit for bit."""
    source = RandomCheckpoint(MODELS[model], host)
    for key, tensor in source.tensors.items():
        source.tensors[key] = tensor * 0.1
    through("mt", source, options(), tmp_path / "mt", host)
    convert(tmp_path / "mt", tmp_path / name, saver=name, options=options(), verify=True, host=host)
    assert_same_tensors(open_with(host[CHECKPOINT_LOADERS].get(name), tmp_path / name, host), source)


def test_what_a_dry_run_finds(tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS["gpt"], host)
    through("mt", source, options(), tmp_path / "mt", host)
    for name in FORMATS:
        convert(tmp_path / "mt", tmp_path / "out", saver=name, options=options(2), dry_run=True, host=host)
        assert not (tmp_path / "out").exists()


def peak() -> int:
    """In KiB, of this process alone: ru_maxrss begins with what the parent had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def growth(rank: int, world: int, source: Path, target: Path, saver: str) -> int:
    """KiB by which converting raises the peak of a process."""
    torch.set_num_threads(1)
    host = load_plugins()
    before = peak()
    convert(source, target, saver=saver, options=options(2), host=host)
    return peak() - before


MIB = 1 << 20


@pytest.mark.slow
def test_memory_stays_at_two_of_the_largest_tensors(tmp_path, host) -> None:
    """A model of 240 MiB with a tensor of 30 MiB: at most twice that, and 110 MiB for libraries and what they keep,
    which makes 170."""
    model = {**LLAMA, "hidden_size": 768, "ffn_hidden_size": 2048, "vocab_size": 10240}
    source = RandomCheckpoint({**model, "num_layers": 1}, host)
    for name, tensor in list(source.tensors.items()):
        for layer in range(1, 8):
            source.tensors[name.replace(".layers.0.", f".layers.{layer}.")] = tensor
    source.metadata["config"]["model"] = {**model, "num_layers": 8}
    largest = max(tensor.nbytes for tensor in source.tensors.values())
    assert largest == 30 * MIB
    assert sum(tensor.nbytes for tensor in source.tensors.values()) > 7 * largest
    through("megatron", source, options(2), tmp_path / "a", host)
    for first, second, saver in (("a", "b", "megatron-dist"), ("b", "c", "megatron")):
        (grown,) = run_ranks(1, growth, tmp_path / first, tmp_path / second, saver)
        assert largest < grown * 1024 < 2 * largest + 110 * MIB, saver
        assert (tmp_path / second).is_dir()
