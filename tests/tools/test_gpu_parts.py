"""bench/gpu/run.sh: every `mt` command of every part has options that exist, measures what its name says, and has a
limit with which the part ends in time."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from mt_core.config.loading import load_config
from mt_core.plugins import load_plugins
from mt_core.train.auto_choices import with_resolved_main_weights
from mt_tools.bench.training_presets import PRESETS

ROOT = Path(__file__).parents[2]
PARTS = "12345678"
SECONDS = 570
MT = ["python3", "-m", "mt_cli"]
TRAIN = ["bench", "train"]


@dataclass(frozen=True)
class Listed:
    name: str
    limit: int
    words: list[str]

    @property
    def options(self) -> list[tuple[str, str]]:
        """Of `mt bench train`, each of whose options takes a value."""
        words = self.words[len(MT + TRAIN) :]
        return list(zip(words[::2], words[1::2], strict=True))


SCRIPT = ROOT / "bench" / "gpu" / "run.sh"


@cache
def listed(part: str) -> list[Listed]:
    done = run("--dry-run", part)
    *lines, _ = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines, part
    heads = [(line.partition(": ")[0].split(", "), line.partition(": ")[2]) for line in lines]
    return [Listed(name, int(limit.removesuffix(" s")), words.split()) for (name, limit), words in heads]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True, check=False)


TRAININGS = [one for part in PARTS for one in listed(part) if one.words[3:5] == TRAIN]


@pytest.mark.parametrize("part", PARTS)
def test_limits_fit_into_a_part_with_the_installation(part) -> None:
    assert 20 + sum(one.limit for one in listed(part)) <= SECONDS


def test_the_first_part_begins_with_what_is_compared() -> None:
    """Tokens/s of three sizes, each beside the plain model of torch on the same machine."""
    names = [one.name for one in listed("1")]
    assert names[:6] == ["train-124m", "plain-124m", "train-1.2b", "plain-1.2b", "train-8b", "plain-8b"]


def test_tests_are_last() -> None:
    commands = [one for part in PARTS for one in listed(part)]
    is_test = ["pytest" in one.words for one in commands]
    assert is_test == sorted(is_test)
    assert sum(is_test) == 3


def test_plain_models_are_those_of_the_presets(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "peer_steps"))
    # Another module of this name may have been imported by the process: the cases of plans.
    monkeypatch.delitem(sys.modules, "cases", raising=False)
    import plain_on_gpu

    for one in (one for one in listed("1") if one.name.startswith("plain-")):
        name = one.words[one.words.index("--preset") + 1]
        case, preset = plain_on_gpu.PRESETS[name].case, PRESETS[name]
        overrides = preset.settings("bf16", small=False)
        config = load_config(preset=preset.preset, overrides=overrides, host=load_plugins()).config
        model = config.model
        assert (case.layers, case.hidden, case.heads, case.vocab) == (
            *(model.num_layers, model.hidden_size, model.num_attention_heads, model.vocab_size),
        )
        assert case.ffn == (model.ffn_hidden_size or 4 * model.hidden_size)
        assert case.groups in (None, model.num_query_groups)
        assert case.tied != model.untie_embeddings_and_output_weights
        assert (case.sequence, case.batch) == (config.data.seq_length, config.train.micro_batch_size)


def test_a_part_that_does_not_exist() -> None:
    done = run("9")
    assert (done.returncode, "the part is 1 to 8" in done.stderr) == (2, True)


@pytest.mark.slow
def test_options_of_commands_exist(mt) -> None:
    for one in (one for part in PARTS for one in listed(part) if one.words[:3] == MT):
        # An unknown option is an error also in front of --help.
        assert mt(*one.words[3:], "--help").code == 0, one


@pytest.mark.parametrize("one", TRAININGS, ids=lambda one: one.name)
def test_trainings_are_what_their_names_say(one) -> None:
    config, features = resolved(one), one.name.split("-")
    assert one.name.startswith(f"train-{dict(one.options)['--preset']}")
    assert config.optimizer.main_weights == ("copies" if "copies" in features else "remainders")
    assert (config.precision.fp8_format != "none") == ("fp8" in features)
    assert (config.precision.fp8_recipe == "rowwise") == ("rowwise" in features)
    assert config.train.compile == "blocks" or "compile" not in features
    assert config.train.cuda_graphs == "blocks" or "graphs" not in features
    assert config.train.cuda_graphs == "step" or "graph" not in features
    assert config.train.compile == "none" or "eager" not in features
    experts = getattr(config.model, "moe", None) or {}
    assert ("grouped" in features) == (experts.get("moe_grouped_gemm") == "grouped")


def resolved(one: Listed) -> Any:
    """The configuration on a GPU, whose kernels update bf16 weights."""
    options = dict(one.options)
    preset = PRESETS[options["--preset"]]
    settings = preset.settings(options.get("--precision", "bf16"), small=False)
    changed = [value for name, value in one.options if name == "--set"]
    loaded = load_config(preset=preset.preset, overrides=[*settings, *changed], host=load_plugins())
    return with_resolved_main_weights(loaded.config, in_one_kernel=True)


def test_modules_that_the_tests_import_are_in_the_bundle() -> None:
    """Also inside functions, where a missing one would show on the GPU alone."""
    script = (ROOT / "bench/gpu/bundle.sh").read_text()
    lines = re.findall(r"^cp (?:-r )?(tests/.*) \"\$bundle/tests(?:/[a-z]+)?\"$", script, re.MULTILINE)
    copied = [ROOT / word for line in lines for word in line.split()]
    pending, seen = sorted((ROOT / "tests/gpu").glob("*.py")), set[Path]()
    while pending:
        path = pending.pop()
        seen.add(path)
        assert any(path == one or one in path.parents for one in copied), f"{path} is not copied by bundle.sh"
        imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
        pending.extend({found for node in imports for found in _test_modules(node)} - seen)


def _test_modules(node: ast.ImportFrom) -> Iterator[Path]:
    """Files of `from tests.x import y`, where y may be a module itself."""
    if node.module is None or not node.module.startswith("tests."):
        return
    folder = ROOT / node.module.replace(".", "/")
    candidates = (folder.with_suffix(".py"), *(folder / f"{name.name}.py" for name in node.names))
    yield from (path for path in candidates if path.exists())


def test_files_of_the_tests_exist() -> None:
    for one in (one for part in PARTS for one in listed(part) if one.words[2] == "pytest"):
        for word in one.words:
            assert not word.startswith("tests/") or (ROOT / word).exists(), word


@pytest.mark.slow
def test_a_part_goes_on_after_a_command_that_fails(tmp_path) -> None:
    """With a Python whose calibration fails, and whose other commands do nothing."""
    (tmp_path / "bundle" / "wheels").mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/bash\ncase "$*" in *zipfile*) exec {sys.executable} "$@" ;; *calibrate*) exit 3 ;; esac\n'
    )
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    command = ["bash", tmp_path / "run.sh", "1", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (1, "failed: calibrate (exit status 3)\n")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["part-1.zip"]
    with ZipFile(tmp_path / "out" / "part-1.zip") as archive:
        assert set(archive.namelist()) == {f"{one.name}.log" for one in listed("1")}
