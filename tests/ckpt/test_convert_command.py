"""`mt convert` and the commands that compare, average and thin out checkpoints, as a user types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import typer
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.convert_cases import GPT2, LLAMA
from typer.testing import CliRunner, Result

from mt_ckpt.commands.ckpt import app
from mt_ckpt.commands.convert import convert as convert_command
from mt_ckpt.convert import convert
from mt_ckpt.difference import differences
from mt_ckpt.files.sizes import parse_bytes
from mt_ckpt.locate import checkpoints_of, superfluous
from mt_ckpt.native.read import open_checkpoint
from mt_ckpt.native.save import save_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import CheckpointError, ConfigError
from mt_core.paths import as_path
from mt_core.plugins import load_plugins
from mt_core.train.trained_model import load_trained_model


def run(application: typer.Typer, *arguments: str | Path) -> Result:
    return CliRunner().invoke(application, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def run_convert(*arguments: str | Path) -> Result:
    application = typer.Typer()
    application.command()(convert_command)
    return run(application, *arguments)


def test_convert_reports_what_it_did(make_model, tmp_path: Path) -> None:
    source = make_model(optimizer=True, **LLAMA)
    target = tmp_path / "hf"
    megatrons_name = "mixtral_hf"  # the lines have ours
    result = run_convert(
        "--load-dir", source, "--save-dir", target, "--saver", megatrons_name, "--max-shard-size", "20KB", "--verify"
    )
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    parameters = sum(t.numel() for n, t in tensors_of(open_checkpoint(source)).items() if n.startswith("model."))
    assert lines[0] == f"{target}: written as hf: 21 tensors, {parameters:,} parameters of a llama model, 116.1 KiB"
    assert "optimizer.exp_avg, optimizer.exp_avg_sq" in lines[1]
    assert lines[2].startswith("verified: 21 tensors are equal bit for bit, and 6 outputs")
    assert len(list(target.glob("*.safetensors"))) > 4


def test_progress_has_bytes_and_time_left(make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if the output were a terminal
    result = run_convert("--load-dir", make_model(**LLAMA), "--save-dir", tmp_path / "x", "--saver", "hf")
    assert result.exit_code == 0, result.exception
    assert re.search(r"converting.*?[0-9.]+/[0-9.]+ KiB", result.stderr, re.DOTALL)
    assert re.search(r"[0-9]:[0-9]{2}:[0-9]{2}", result.stderr)  # time left


def test_convert_of_a_run_directory(make_model, tmp_path: Path) -> None:
    make_model("run/checkpoints/iter_0000004", **GPT2)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("iter_0000004\n")
    result = run_convert("--load-dir", tmp_path / "run", "--save-dir", tmp_path / "hf", "--saver", "hf", "--dry-run")
    assert "nothing written; hf can hold it: 40 tensors" in result.output
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-shard-size", "5 gigs"], "--max-shard-size 5 gigs: not a size; write for instance 500MB, 5GB or 5GiB"),
        (["--max-shard-size", "0GB"], "--max-shard-size 0GB: a file holds at least one byte"),
        (["--dtype", "int4"], "--dtype int4: not a dtype of weights; it can be fp32, bf16, fp16"),
        (["--target-tensor-parallel-size", "2"], "--target-tensor-parallel-size 2 means nothing to the format hf"),
    ],
)
def test_wrong_options(make_model, tmp_path: Path, arguments: list[str], words: str) -> None:
    source = make_model(**LLAMA)
    result = run_convert("--load-dir", source, "--save-dir", tmp_path / "x", "--saver", "hf", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


@pytest.mark.parametrize("granularity", [1, 2])
def test_upcycled_by_the_command_computes_what_the_dense_model_does(
    make_model, tmp_path: Path, granularity: int
) -> None:
    """48 inner channels in experts of 48 or 24; the bound is that of sums in another order."""
    source, target = make_model(**LLAMA), tmp_path / "moe"
    experts = ["--upcycle-experts", "4", "--granularity", str(granularity)]
    result = run_convert("--load-dir", source, "--save-dir", target, "--saver", "mt", "--verify", *experts)
    assert result.exit_code == 0, result.exception
    name = "model.decoder.layers.1.mlp.experts.linear_fc2.weight"
    assert open_checkpoint(target).shapes()[name] == (4, 32, 48 // granularity)
    tokens = torch.randint(0, 101, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        dense, upcycled = (load_trained_model(path, load_plugins()).model.eval()(tokens) for path in (source, target))
    torch.testing.assert_close(upcycled, dense, rtol=1e-4, atol=1e-4)


def test_granularity_without_experts(make_model, tmp_path: Path) -> None:
    arguments = ["--load-dir", make_model(**LLAMA), "--save-dir", tmp_path / "x", "--saver", "mt"]
    result = run_convert(*arguments, "--granularity", "2")
    assert isinstance(result.exception, ConfigError)
    assert "--granularity 2 says how narrow the experts of --upcycle-experts are" in str(result.exception)


def test_sizes() -> None:
    assert [parse_bytes(text, "") for text in ("7", "1.5KB", "5GB", "5 GiB", "2TB")] == [
        7, 1500, 5 * 10**9, 5 << 30, 2 * 10**12,
    ]  # fmt: skip


# -- mt ckpt diff -----------------------------------------------------------------------------------


def test_diff_across_formats(make_model, host, tmp_path: Path) -> None:
    source = make_model(**LLAMA)
    convert(source, tmp_path / "hf", saver="hf", host=host)
    (tmp_path / "hf" / "mt-checksums.json").unlink()  # tests change the files
    same = run(app, "diff", source, tmp_path / "hf")
    assert (same.exit_code, same.output) == (0, "the same: 21 tensors\n")


def test_diff_and_average_with_the_formats_given(make_model, host, tmp_path: Path) -> None:
    source, other = make_model(**GPT2), tmp_path / "other"
    convert(source, other, saver="transformers-megatron", host=host)
    result = run(app, "diff", source, other, "--loader", "mt", "--other-loader", "transformers-megatron")
    assert (result.exit_code, result.output) == (0, "the same: 40 tensors\n")
    wrong = run(app, "diff", source, other, "--other-loader", "hf")
    assert isinstance(wrong.exception, CheckpointError)
    mean = run(app, "average", other, other, "--loader", "transformers-megatron", "--save-dir", tmp_path / "mean")
    assert mean.exit_code == 0, mean.exception
    assert_same_state(tensors_of(open_checkpoint(source)), tensors_of(open_checkpoint(tmp_path / "mean")))
    wrong = run(app, "average", other, other, "--loader", "mt", "--save-dir", tmp_path / "x")
    assert isinstance(wrong.exception, CheckpointError)


def test_integers_are_compared_exactly(tmp_path: Path) -> None:
    """fp64 has the same number for 2^53 and 2^53 + 1; differences that int64 cannot hold are those of fp64."""
    values = {"near": (2**53, 2**53 + 1), "far": (-(2**63), 2**63 - 1), "same": (2**62 + 1, 2**62 + 1)}
    for side in (0, 1):
        state = {name: torch.tensor([pair[side]]) for name, pair in values.items()}
        save_checkpoint(tmp_path / str(side), state.items(), {}, {})
    first, second = (open_checkpoint(tmp_path / str(side)) for side in (0, 1))
    found = {one.name: (one.largest, one.count) for one in differences(first, second, list(values))}
    assert found == {"near": (1.0, 1), "far": (2.0**64, 1)}


def test_diff_shows_the_largest_first(make_model, tmp_path: Path) -> None:
    source = make_model(**LLAMA)
    reader = open_checkpoint(source)
    state = tensors_of(reader)
    state["model.decoder.layers.0.mlp.linear_fc2.weight"][0, :3] += 0.5
    state["model.decoder.layers.1.mlp.linear_fc2.weight"][1, 1] += 2
    state["model.decoder.layers.2.input_layernorm.weight"][0] = float("nan")
    state["model.output_layer.weight"] = state["model.output_layer.weight"].bfloat16().float()[:99]
    state["model.decoder.final_layernorm.weight"] = state["model.decoder.final_layernorm.weight"].double()
    del state["model.embedding.word_embeddings.weight"]
    state["extra"] = torch.zeros(2)
    save_checkpoint(tmp_path / "other", state.items(), reader.metadata, {})
    result = run(app, "diff", source, tmp_path / "other")
    assert result.exit_code == 1
    rows = [line.split() for line in result.output.splitlines()]
    assert ["model.embedding.word_embeddings.weight", "only", "in", "the", "first"] in rows
    assert ["extra", "only", "in", "the", "second"] in rows
    assert ["model.output_layer.weight", "shape", "[101,", "32]", "and", "[99,", "32]"] in rows
    assert ["model.decoder.final_layernorm.weight", "float32", "and", "float64"] in rows
    values = [row for row in rows if row[1:2] == ["values"]]
    assert [(row[0].split(".")[3], row[2], row[3]) for row in values] == [
        ("2", "inf", "1"),
        ("1", "2", "1"),
        ("0", "0.5", "3"),
    ]
    assert "7 of 22 tensors differ" in result.output
    shown = run(app, "diff", source, tmp_path / "other", "--model-only", "--top", "2").output
    assert "6 of 21 tensors differ; 2 are shown" in shown


# -- mt ckpt prune ----------------------------------------------------------------------------------


def make_run(folder: Path, iterations: list[int], latest: int | None) -> Path:
    checkpoints = folder / "checkpoints"
    for iteration in iterations:
        save_checkpoint(
            checkpoints / f"iter_{iteration:07d}", [("model.w", torch.full((4,), float(iteration)))], {}, {}
        )
    if latest is not None:
        (checkpoints / "latest").write_text(f"iter_{latest:07d}\n")
    return folder


def left(run_directory: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoints_of(run_directory, load_plugins())]


def test_prune(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [100, 200, 250, 300, 400, 500], 500)
    (folder / "checkpoints" / "iter_0000150").mkdir()  # not a checkpoint: not ours to remove
    dry = run(app, "prune", folder, "--keep-last", "2", "--keep-every", "200", "--dry-run")
    assert [line.rpartition("_")[2] for line in dry.output.splitlines()[:-1]] == ["0000100", "0000250", "0000300"]
    assert left(folder) == [100, 200, 250, 300, 400, 500]
    done = run(app, "prune", folder, "--keep-last", "2", "--keep-every", "200")
    assert done.output.endswith("3 of 6 checkpoints kept\n")
    assert left(folder) == [200, 400, 500]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "iter_0000150", "iter_0000200", "iter_0000400", "iter_0000500", "latest",
    ]  # fmt: skip


def test_prune_never_removes_the_latest(tmp_path: Path) -> None:
    """A run that was set back: its latest checkpoint is not the one with the highest number."""
    folder = make_run(tmp_path / "run", [100, 200, 300], 100)
    run(app, "prune", folder, "--keep-last", "1")
    assert left(folder) == [100, 300]


def test_prune_of_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        checkpoints_of(tmp_path / "none", load_plugins())
    with pytest.raises(CheckpointError, match="has no checkpoint iter_"):
        checkpoints_of(tmp_path, load_plugins())
    with pytest.raises(ConfigError, match="--keep-last 0: give 1 or more"):
        superfluous([tmp_path], 0, None)


# -- mt ckpt average --------------------------------------------------------------------------------


def test_average(make_model, host, tmp_path: Path) -> None:
    """Across formats; the mean is that of float64, rounded once to the weights' own format."""
    paths = [make_model(f"c{i}", iteration=i, dtype=torch.bfloat16, optimizer=i == 3, **LLAMA) for i in (1, 2, 3)]
    convert(paths[0], tmp_path / "hf", saver="hf", host=host)
    result = run(app, "average", tmp_path / "hf", *paths[1:], "--save-dir", tmp_path / "mean")
    assert result.exit_code == 0, result.exception
    mean = open_checkpoint(tmp_path / "mean")
    assert mean.metadata["iteration"] == 3
    assert mean.metadata["average_of"] == [str(tmp_path / "hf"), *map(str, paths[1:])]
    states = [tensors_of(open_checkpoint(path)) for path in paths]
    assert set(mean.shapes()) == {name for name in states[0] if name.startswith("model.")}
    for name, tensor in tensors_of(mean).items():
        expected = sum(state[name].double() for state in states) / 3
        torch.testing.assert_close(tensor, expected.bfloat16(), rtol=2**-7, atol=0)
        assert not torch.equal(tensor, states[0][name])


def test_average_names_the_files_that_the_format_leaves_out(make_model, tmp_path: Path) -> None:
    """Also of a format that declares none, which converts what it understands of them."""
    paths = [tmp_path / name for name in ("a", "b")]
    for seed, path in enumerate(paths, 1):
        source = open_checkpoint(make_model(f"c{seed}", iteration=seed, **LLAMA))
        save_checkpoint(path, tensors_of(source).items(), source.metadata, {"generation_config.json": b"{}"})
    result = run(app, "average", *paths, "--save-dir", tmp_path / "mean.gguf", "--saver", "gguf")
    assert result.exit_code == 0, result.exception
    assert "left out, since gguf has no place for them: the files generation_config.json" in result.stdout
    assert "the files" not in run(app, "average", *paths, "--save-dir", tmp_path / "mean").stdout


def test_average_to_an_address_makes_no_local_folder(
    make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [make_model(f"c{i}", iteration=i, **GPT2) for i in (1, 2)]
    address = f"memory://{tmp_path.name}/x"
    monkeypatch.chdir(tmp_path)
    result = run(app, "average", *paths, "--save-dir", address, "--saver", "megatron")
    assert isinstance(result.exception, ConfigError)
    assert f"--save-dir {address}: --saver megatron writes local folders" in str(result.exception)
    result = run(app, "average", *paths, "--save-dir", address)
    assert result.exit_code == 0, result.exception
    assert open_checkpoint(as_path(address)).metadata["iteration"] == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c1", "c2"]


def test_average_of_a_runs_last(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [100, 200, 400], 400)
    run(app, "average", folder, "--last", "2", "--save-dir", tmp_path / "mean")
    assert tensors_of(open_checkpoint(tmp_path / "mean"))["model.w"].tolist() == [300.0] * 4


def test_average_refusals(make_model, tmp_path: Path) -> None:
    first, second = make_model("a", **LLAMA), make_model("b", **GPT2)

    def refusal(*arguments: str | Path) -> str:
        return str(run(app, "average", *arguments, "--save-dir", tmp_path / "x").exception)

    assert "are not of one model: model.decoder.layers.0.self_attention.linear_qkv.weight" in refusal(first, second)
    assert "give two checkpoints or more" in refusal(first)
    assert "--last 2 takes one run directory, got 2 paths" in refusal(first, second, "--last", "2")
    assert not (tmp_path / "x").exists()


def test_options_have_the_names_of_the_flags() -> None:
    """Each option of ConvertOptions is a flag of the command, so that none is out of reach."""
    import inspect

    flags = set(inspect.signature(convert_command).parameters)
    assert set(ConvertOptions.__dataclass_fields__) <= flags
