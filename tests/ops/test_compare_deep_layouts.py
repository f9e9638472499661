"""mt compare --deep of two layouts, and of two versions of mt: layout bugs that are put in by hand are named.

60 s of CPU: runs of a small model on one and on two ranks, in this mt and in changed copies of it."""

from __future__ import annotations

import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch

import mt_core
from mt_core.errors import ConfigError
from mt_core.nn.layout import Split
from mt_core.plugins import load_plugins
from mt_ops.deep.comparison import DeepComparison
from mt_ops.deep.layer_outputs import Piece, assembled
from mt_ops.deep.layouts import compare_configurations, small_configuration
from mt_ops.deep.other_process import layout_of

ONE = """
[model]
family = "gpt"
num_layers = 2
hidden_size = 32
num_attention_heads = 4
ffn_hidden_size = 96
max_position_embeddings = 32
[data]
dataset_type = "builtin"
corpus_bytes = 200000
seq_length = 32
[train]
train_iters = 4
micro_batch_size = 1
global_batch_size = 4
[tokenizer]
tokenizer_type = "ByteLevelTokenizer"
"""
TP = ONE + "[parallel]\ntensor_model_parallel_size = 2\n"
BIAS = ("nn/linear.py", "leave_tensor_parallel(linear(x, weight, None), ctx)")
BIAS_OF_EACH_RANK = "leave_tensor_parallel(linear(x, weight, bias), ctx)"
SUMS = ("optim/finalize_grads.py", "for axis, parts in partial.items():")
NO_SUMS = "for axis, parts in list(partial.items())[:0]:"


def changed_mt(folder: Path, file: str, before: str, after: str) -> Path:
    """An interpreter whose mt_core has a bug."""
    copy = folder / "packages/mt_core"
    shutil.copytree(Path(mt_core.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / file).read_text()
    assert text.count(before) == 1
    (copy / file).write_text(text.replace(before, after))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{copy.parent}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def configurations(folder: Path, other: str) -> tuple[Path, Path]:
    (folder / "one.toml").write_text(ONE)
    (folder / "other.toml").write_text(other)
    return folder / "one.toml", folder / "other.toml"


def named(compared: DeepComparison) -> list[str]:
    return [f"{each.part} {each.name}" for each in compared.first]


@pytest.mark.dist
@pytest.mark.long
def test_two_layouts_are_the_same_up_to_rounding(tmp_path: Path) -> None:
    compared = compare_configurations(*configurations(tmp_path, f"{TP}sequence_parallel = true\n"), steps=1)
    assert named(compared) == []
    outputs = [each.name for each in compared.compared if each.part == "output of"]
    layer = ["self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"]
    assert [name for name in outputs if name.endswith(tuple(layer))] == [
        f"decoder.layers.{number}.{name}" for number in (0, 1) for name in layer
    ]
    # Sums in another order do differ: what is compared is not the same computation twice.
    assert any(each.relative > 0 for each in compared.compared if each.part == "output of")


EXPERTS = "moe = {num_experts = 12, moe_router_topk = 2, moe_ffn_hidden_size = 96}"


@pytest.mark.parametrize(
    ("model", "one", "other"),
    [
        ("", "", "tensor_model_parallel_size = 2"),
        ("", "tensor_model_parallel_size = 4", "tensor_model_parallel_size = 2\ncontext_parallel_size = 2"),
        ("", "", 'context_parallel_size = 4\ncp_comm_type = "a2a"'),
        ("", "pipeline_model_parallel_size = 2", "pipeline_model_parallel_size = 4"),
        ("", "context_parallel_size = 2", "use_distributed_optimizer = true\nnum_distributed_optimizer_instances = 2"),
        (EXPERTS, "tensor_model_parallel_size = 2", "expert_model_parallel_size = 4"),
    ],
)
def test_both_sides_have_one_small_model(tmp_path: Path, model: str, one: str, other: str) -> None:
    """Sizes that each rank has 16 of, or that ranks divide, are those of both layouts."""
    host, text = load_plugins(), ONE.replace("num_layers = 2", f"num_layers = 8\n{model}".rstrip())
    files = [tmp_path / "one.toml", tmp_path / "other.toml"]
    for file, layout in zip(files, (one, other), strict=True):
        file.write_text(f"{text}[parallel]\n{layout}\n")
    mine, theirs = (small_configuration(*pair, host, 1) for pair in (files, files[::-1]))
    assert mine.model == theirs.model
    assert (mine.data, mine.train.global_batch_size) == (theirs.data, theirs.train.global_batch_size)
    assert mine.parallel != theirs.parallel


def test_models_of_other_sizes_are_refused(tmp_path: Path) -> None:
    """Although their small versions are the same."""
    files = configurations(tmp_path, TP.replace("hidden_size = 32", "hidden_size = 64"))
    with pytest.raises(ConfigError, match=r"have other models \(hidden_size"):
        compare_configurations(*files, steps=1)


@pytest.mark.dist
@pytest.mark.long
def test_a_bias_that_each_rank_adds_is_named(tmp_path: Path) -> None:
    python = changed_mt(tmp_path, *BIAS, BIAS_OF_EACH_RANK)
    compared = compare_configurations(*configurations(tmp_path, TP), steps=1, python_b=python)
    assert named(compared)[0] == "output of decoder.layers.0.self_attention.linear_proj"


@pytest.mark.dist
@pytest.mark.long
def test_gradients_of_norms_that_are_not_summed_are_named(tmp_path: Path) -> None:
    python = changed_mt(tmp_path, *SUMS, NO_SUMS)
    files = configurations(tmp_path, f"{TP}sequence_parallel = true\n")
    compared = compare_configurations(*files, steps=1, python_b=python)
    # The forward pass is right; the last norm is the first parameter of the backward pass.
    assert named(compared)[0] == "gradient of decoder.final_layernorm.bias"


def test_an_interpreter_without_mt_is_named(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho there is no module named mt_core >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ConfigError, match=f"B, computed by {tmp_path}/python, failed:\nthere is no module"):
        layout_of(tmp_path / "python", tmp_path / "x.toml", tmp_path / "a.toml", 1)
    with pytest.raises(ConfigError, match="--python-b .*name the python of an environment"):
        layout_of(tmp_path / "missing", tmp_path / "x.toml", tmp_path / "a.toml", 1)


def test_parts_of_ranks_become_the_whole_tensor() -> None:
    """Two samples of four positions: context parallelism (0, 3 and 1, 2), two tensor-parallel shares of two blocks."""
    whole, split = torch.arange(2 * 4 * 8.0).reshape(2, 4, 8), Split(0, "tp", sections=2)
    shares = Split(2, "tp", sections=2).cut(whole, 2)
    pieces = [
        Piece("layers.0.up", sample, places, tp, split, shares[tp][sample : sample + 1, places])
        for sample in (1, 0)
        for places in ((0, 3), (1, 2))
        for tp in (0, 1)
    ]
    (found,) = assembled(pieces, 4).values()
    assert torch.equal(found, whole)
    # Sequence parallelism: each rank has two positions and all features.
    parts = [Piece("x", 0, (2 * tp, 2 * tp + 1), tp, None, whole[:, 2 * tp : 2 * tp + 2]) for tp in (0, 1)]
    assert torch.equal(assembled(parts, 4)["x"], whole)
    # Copies that differ are there too; what no rank has completely is not.
    copies = [Piece("x", 0, (0, 1, 2, 3), tp, None, whole + tp) for tp in (0, 1)]
    assert list(assembled(copies, 4)) == ["x", "x (copy 1)"]
    assert assembled(parts[:1], 4) == {}
