"""`mt train` and `mt generate` as a user types them: what is shown, what is written, and each kind of bad input."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mt_cli.commands import train as train_command
from mt_cli.commands.train import _announce, _next_commands, _own_command
from mt_cli.main import run
from mt_core import hookimpl
from mt_core.kinds import Lazy
from mt_core.plugins import Plugin, load_plugins
from mt_core.specs import LossSpec

SMALL = {
    "model.num_layers": "1",
    "model.hidden_size": "16",
    "model.num_attention_heads": "2",
    "data.seq_length": "16",
    "data.corpus_bytes": "1000000",
    "train.micro_batch_size": "2",
    "train.train_iters": "4",
    "train.eval_interval": "2",
    "train.eval_iters": "2",
    "train.sample_tokens": "5",
    "train.num_threads": "1",
    "checkpoint.save_interval": "2",
    "lr_schedule.lr_warmup_iters": "1",
    "logging.log_interval": "1",
}


def arguments(run_dir: Path, **changes: str) -> list[str]:
    settings = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    return ["train", "--run-dir", str(run_dir), *(part for k, v in settings.items() for part in ("--set", f"{k}={v}"))]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that has ended, with checkpoints of steps 2 and 4."""
    path = tmp_path_factory.mktemp("runs") / "small"
    assert run(arguments(path)) == 0
    return path


def refused(capsys: pytest.CaptureFixture[str], command: list[str], words: str) -> None:
    """The command ends with a code other than 0 and one message, without a traceback."""
    code = run(command)
    shown = capsys.readouterr().err
    assert code not in (0, None)
    assert shown.startswith("error: ")
    assert "Traceback" not in shown
    assert re.search(words, re.sub(r"\s+", " ", shown)), shown


# -- what it does ---------------------------------------------------------------------------------


def test_it_shows_progress_losses_a_sample_and_what_to_type_next(tmp_path, capsys) -> None:
    assert run(arguments(tmp_path / "run")) == 0
    shown = capsys.readouterr().out
    line = (
        r"^[\d-]+ [\d:]+ step 2/4 \| loss \d\.\d+ \| grad norm [\d.]+ \| lr [\d.e+-]+ \| [\d.]+ ms \| [\d,]+ tokens/s"
    )
    assert re.search(rf"{line} \| [\d.e-]+ TFLOP/s \| \d:\d\d:\d\d left$", shown, re.MULTILINE)
    assert re.search(r"step 2 \| valid loss \d\.\d+", shown)
    assert re.search(r"valid loss \d\.\d+ \([\d.]+ bits per token\)", shown)
    assert re.search(r"a bigram model of the same text has \d\.\d+", shown)
    assert "\ndef " in shown
    assert f"mt generate {tmp_path / 'run'}" in shown


@pytest.mark.slow
def test_it_says_something_before_torch_is_imported() -> None:
    """The process ends where torch would be imported, with the line written."""
    code = (
        "import os, sys\n"
        "from importlib.util import spec_from_loader\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return spec_from_loader(name, self) if name == 'torch' else None\n"
        "    def create_module(self, spec):\n"
        "        os._exit(7)\n"
        "    def exec_module(self, module):\n"
        "        pass\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from mt_cli.main import run\n"
        "run(['train', '--set', 'train.train_iters=1'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "mt train: gpt-tiny; loading torch and plugins ...\n"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, True),  # also what starts the ranks of --nproc
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "MT_LAUNCH_DIR": "runs"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, True),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, False),
    ],
)
def test_one_process_of_a_job_says_it(monkeypatch, capsys, environ, says) -> None:
    monkeypatch.setattr(os, "environ", {"SLURM_NODELIST": "node01", **environ})
    _announce(None, "gpt-tiny")
    assert bool(capsys.readouterr().out) == says


@pytest.mark.parametrize(
    ("environ", "found", "command"),
    [
        ({"UV": "/bin/uv"}, "/env/bin/mt", "uv run mt"),  # which has put mt on the path, for the command alone
        ({}, "/env/bin/mt", "mt"),
        ({}, None, f"{sys.executable} -m mt_cli"),
    ],
)
def test_what_comes_next_can_be_typed(monkeypatch, environ, found, command) -> None:
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(shutil, "which", lambda name: found)
    assert _own_command() == command


@pytest.mark.parametrize(("data", "first"), [("sft", "chat"), ("gpt", "generate"), ("builtin", "generate")])
def test_what_comes_next_suits_the_task(monkeypatch, tmp_path, data, first) -> None:
    monkeypatch.setattr("mt_cli.sample.continues", lambda trainer, prompt: True)
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(save=None),
        data=SimpleNamespace(dataset_type=data),
    )
    trainer = SimpleNamespace(config=config, loaded=SimpleNamespace(preset=None))
    commands = [command for command, _ in _next_commands(trainer, tmp_path, "Once")]
    assert re.search(rf"{first} {tmp_path}", commands[0])
    assert f"serve {tmp_path}" in commands[1]


@pytest.mark.slow
def test_a_sample_is_of_a_prompt_that_the_tokenizer_reads(tmp_path, capsys, monkeypatch) -> None:
    numbers = {"data.dataset_type": "mock", "tokenizer.tokenizer_type": "NullTokenizer", "tokenizer.vocab_size": "64"}
    settings = {**SMALL, **numbers, "train.eval_interval": "null"}
    del settings["data.corpus_bytes"]
    command = ["train", "--run-dir", str(tmp_path / "run")]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    refused(capsys, [*command, "--set", "train.sample_prompt=once upon"], "train.sample_prompt='once upon' .*null")
    assert not list(tmp_path.glob("run/checkpoints/*"))
    assert run(command) == 0
    shown = capsys.readouterr().out
    assert "A sample" not in shown
    assert "mt generate" not in shown
    monkeypatch.setattr("mt_cli.sample._print_text", lambda *_: 1 / 0)
    assert run([*command, "--set", 'train.sample_prompt="1 2"']) == 0
    assert "warning: no text was generated: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_continues_each_prompt(finished, capsys, monkeypatch) -> None:
    options = ["--max-tokens", "3", "--temperature", "0"]
    assert run(["generate", str(finished), "--prompt", "def ", *options]) == 0
    alone = capsys.readouterr().out
    assert run(["generate", str(finished), "--prompt", "def ", "--prompt", "class ", *options]) == 0
    both = capsys.readouterr().out
    assert both.startswith(alone + "\nclass ")
    monkeypatch.setattr("sys.stdin", io.StringIO("def "))
    assert run(["generate", str(finished), "--prompt", "-", *options]) == 0
    assert capsys.readouterr().out == alone
    refused(capsys, ["generate", str(finished), "--prompt", "-", "--prompt", "-"], "it can be given once")


def test_a_run_takes_its_shape_from_a_checkpoint(finished, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["train.train_iters=1", "train.eval_iters=1", "data.corpus_bytes=1000000", "train.sample_prompt=null"]
    given = [f"checkpoint.load={finished}", "data.seq_length=16", "train.micro_batch_size=2", *short]
    assert run(["train", *(part for text in given for part in ("--set", text))]) == 0
    config = json.loads((tmp_path / "runs" / "from-small" / "config.json").read_text())
    assert config["model"]["hidden_size"] == 16
    origins = json.loads((tmp_path / "runs" / "from-small" / "config-origins.json").read_text())
    assert origins["model.hidden_size"] == f"checkpoint {finished}"


def test_it_writes_the_resolved_config_the_metrics_the_log_and_checkpoints(finished) -> None:
    config = json.loads((finished / "config.json").read_text())
    assert config["model"]["hidden_size"] == 16
    assert config["model"]["vocab_size"] > 256
    assert json.loads((finished / "config-origins.json").read_text())["model.hidden_size"] == "--set"
    kinds = [json.loads(line)["kind"] for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["train", "train", "valid", "train", "train", "valid"]
    assert sorted(path.name for path in (finished / "checkpoints").glob("iter_*")) == ["iter_0000002", "iter_0000004"]
    assert "step 4/4" in (finished / "log.txt").read_text()


def test_a_file_names_the_run_and_may_name_a_preset(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    sections: dict[str, dict[str, object]] = {}
    for key, value in SMALL.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    lines = ['preset = "gpt-tiny"']
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{name} = {value}" for name, value in values.items())]
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    assert run(["train", "mine.toml", "--set", "train.train_iters=2"]) == 0
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "latest").read_text() == "iter_0000002\n"


def test_the_same_command_goes_on(tmp_path, capsys) -> None:
    assert run(arguments(tmp_path / "run", train__exit_iteration="2")) == 0
    assert "Stopped at step 2" in capsys.readouterr().out
    assert run(arguments(tmp_path / "run")) == 0
    shown = capsys.readouterr().out
    assert "resumed from" in shown
    assert "step 3/4" in shown
    assert "step 2/4" not in shown
    assert run(arguments(tmp_path / "run")) == 0
    assert "This run is complete (4 steps)" in capsys.readouterr().out


def test_time_limits_of_phases_come_from_the_configuration(tmp_path, monkeypatch) -> None:
    from mt_core.launch import phases

    limits = {}
    entered = phases.Phases.enter

    def enter(self: phases.Phases, phase: str, timeout: float | None = None, step: int | None = None) -> None:
        entered(self, phase, timeout, step)
        limits[phase] = self.position.timeout

    monkeypatch.setattr(phases.Phases, "enter", enter)
    assert run(arguments(tmp_path, timeouts__step="7.5", timeouts__save="90")) == 0
    assert (limits["step"], limits["save"], limits["load"]) == (7.5, 90, 3600)


@pytest.mark.slow
def test_bits_and_perplexity_are_printed_of_cross_entropies_alone(tmp_path, capsys, monkeypatch) -> None:
    """A plugin's loss of a model of text has a value a token too, which need not be a cross entropy."""
    loss = LossSpec(name="mine", doc="of a plugin", build=Lazy("mt_core.nn.loss:build_cross_entropy"))
    host = load_plugins()
    hook = staticmethod(hookimpl(lambda: [loss]))
    host.add(type("Module", (), {"mt_register_losses": hook}), Plugin("theirs", "m", "theirs", "1.0"))
    monkeypatch.setattr(train_command, "load_plugins", lambda: host)
    assert run(arguments(tmp_path / "run", train__loss="mine", logging__trackers='["tensorboard"]')) == 0
    shown = capsys.readouterr().out
    assert re.search(r"valid loss \d\.\d+\n", shown), shown
    assert "bits per token" not in shown
    written = b"".join(path.read_bytes() for path in (tmp_path / "run" / "tensorboard").glob("events*"))
    assert b"lm loss validation" in written
    assert b"ppl" not in written


@pytest.mark.slow
def test_sigterm_saves_and_has_a_status_of_its_own(tmp_path) -> None:
    command = [sys.executable, "-m", "mt_cli", *arguments(tmp_path / "run", train__train_iters="1000000")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size > 500) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 75, shown
    assert "stopped by signal SIGTERM" in shown
    latest = (tmp_path / "run" / "checkpoints" / "latest").read_text().strip()
    assert f"after step {int(latest.removeprefix('iter_'))}" in shown


@pytest.mark.slow
def test_generate_repeats_with_a_seed_however_a_prompt_is_cut(finished, capsys) -> None:
    def text(*options: str) -> str:
        assert run(["generate", str(finished), "--prompt", "import ", "--max-tokens", "30", *options]) == 0
        return capsys.readouterr().out

    first = text("--seed", "3")
    assert first.startswith("import ")
    assert first == text("--seed", "3")
    small = ("--set", "inference.cache_block_size=1", "--set", "inference.max_tokens_per_step=2")
    assert first == text("--seed", "3", *small)
    assert first != text("--seed", "4")
    assert text("--temperature", "0") == text("--temperature", "0", "--top-k", "5")
    assert text("--top-k", "1", "--seed", "1") == text("--temperature", "0")


def test_generate_from_one_checkpoint(finished, capsys) -> None:
    checkpoint = finished / "checkpoints" / "iter_0000002"
    assert run(["generate", str(checkpoint), "--prompt", "a", "--max-tokens", "3", "--seed", "1"]) == 0
    assert capsys.readouterr().out.startswith("a")


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__hiden_size": "3"}, r'unknown key model\.hiden_size \(from --set\) \(did you mean "hidden_size"\?\)'),
        ({"train__num_layers": "3"}, r"unknown key train\.num_layers"),
        ({"optimiser__lr": "1.0"}, r'unknown section optimiser .*did you mean "optimizer"'),
        ({"train__train_iters": '"ten"'}, r"train\.train_iters \(from --set\): got 'ten', expected an integer"),
        ({"optimizer__lr": "fast"}, r"optimizer\.lr \(from --set\): got 'fast', expected a number"),
        ({"model__num_attention_heads": "3"}, r"hidden_size=16 is not divisible .*1, 2, 4, 8 or 16"),
        (
            {"model__position_embedding_type": "learned_absolute", "model__max_position_embeddings": "8"},
            r"data\.seq_length=16 is longer than model\.max_position_embeddings=8",
        ),
        ({"train__global_batch_size": "3"}, r"global_batch_size=3 is no multiple of .*nearest legal values are 2 or 4"),
        (
            {"parallel__tensor_model_parallel_size": "2"},
            r"tensor_model_parallel_size=2 does not divide .*=1; it can be 1",
        ),
        ({"model__moe": "{num_experts=4, moe_router_topk=9}"}, r"model\.moe\.moe_router_topk=9"),
        ({"tokenizer__tokenizer_type": "Byt"}, r"tokenizer\.tokenizer_type=Byt needs a tokenizer named"),
        ({"optimizer__lr": "1e9"}, r"optimizer\.lr=1000000000\.0 is no learning rate .*it is at most 1000"),
        ({"optimizer__min_lr": "1.0", "optimizer__lr": "0.1"}, r"optimizer\.min_lr=1\.0 is above optimizer\.lr=0\.1"),
    ],
)
def test_impossible_settings(tmp_path, capsys, changes, words) -> None:
    refused(capsys, arguments(tmp_path / "run", **changes), words)
    assert not (tmp_path / "run").exists(), "nothing is written before the settings are right"


def test_wrong_types_are_found_without_torch(tmp_path) -> None:
    """Also those of the model, whose families declare their keys beside code of torch."""
    code = (
        "import sys\n"
        "from mt_cli.main import run\n"
        "for setting in sys.argv[1:]:\n"
        "    assert run(['train', '--run-dir', 'run', '--set', setting]) in (2, 3), setting\n"
        "    assert 'torch' not in sys.modules, setting\n"
    )
    wrong = ["train.train_iters=x", "model.num_layers=x", "model.unknown=1", "optimizer.lr=fast", "data.seq_length=x"]
    wrong += ["model.family=none", "data.dataset_type=none", "checkpoint.save=1", "tokenizer.unknown=1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *wrong], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == len(wrong)
    assert list(tmp_path.iterdir()) == []


def data_arguments(tmp_path: Path, path: Path) -> list[str]:
    command = arguments(tmp_path / "run", data__dataset_type="gpt", data__data_path=f'["{path}"]')
    at = command.index("data.corpus_bytes=1000000")
    return command[: at - 1] + command[at + 1 :]


def test_missing_data(tmp_path, capsys) -> None:
    refused(capsys, data_arguments(tmp_path, tmp_path / "nowhere_text_document"), r"nowhere_text_document")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", r"empty\.txt|no text|no documents|empty"),
        ("latin.txt", "caf\xe9 ".encode("latin-1") * 100, r"latin\.txt.*UTF-8"),
        ("latin.jsonl", b'{"text": "caf\xe9"}\n', r"latin\.jsonl.*(line 1|:1).*"),
    ],
)
def test_empty_data_and_text_that_is_not_utf8(tmp_path, capsys, name, content, words) -> None:
    (tmp_path / name).write_bytes(content)
    refused(capsys, data_arguments(tmp_path, tmp_path / name), words)
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_cannot_be_written(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    refused(capsys, arguments(tmp_path / "file" / "run"), r"run directory .*choose another with --run-dir")


def test_a_config_file_that_is_missing_or_malformed(tmp_path, capsys) -> None:
    refused(capsys, ["train", str(tmp_path / "no.toml")], r"no\.toml: No such file")
    (tmp_path / "bad.toml").write_text("[model\n")
    refused(capsys, ["train", str(tmp_path / "bad.toml")], r"bad\.toml: .*line 1")


def test_resuming_with_another_model(finished, tmp_path, capsys) -> None:
    shutil.copytree(finished, tmp_path / "run")
    refused(
        capsys,
        arguments(tmp_path / "run", model__hidden_size="32"),
        r"model\.hidden_size: 16 in the checkpoint, 32 now.*use another --run-dir",
    )


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_named(finished, tmp_path, capsys, damage) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("iter_0000002\n")
    checkpoint = tmp_path / "run" / "checkpoints" / "iter_0000002"
    shard = next(path for path in sorted(checkpoint.rglob("*.safetensors")) if path.stat().st_size > 100_000)
    content = bytearray(shard.read_bytes())
    if damage == "truncate":
        shard.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[-1000] ^= 1
        shard.write_bytes(content)
    else:
        shard.unlink()
    refused(capsys, arguments(tmp_path / "run"), re.escape(shard.name))


def test_generate_from_nothing(tmp_path, capsys) -> None:
    refused(capsys, ["generate", str(tmp_path / "nowhere")], "no such directory")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    refused(capsys, ["generate", str(tmp_path / "run")], "no complete checkpoint yet")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], "temperature is -1"),
        (["--top-p", "0"], "top_p is 0"),
        (["--top-k", "-2"], "top_k is -2"),
    ],
)
def test_generate_with_impossible_options(finished, capsys, options, words) -> None:
    refused(capsys, ["generate", str(finished), *options], words)


def _train_with_little_room(command: list[str], largest_file: int, code: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    Path(code).write_text(str(run(command)))
    os._exit(0)


@pytest.mark.slow
def test_no_space_left_during_a_save_keeps_the_previous_checkpoint(tmp_path, capfd) -> None:
    """A limit on the size of files stands for the full disk: the write fails in the middle."""
    assert run(arguments(tmp_path / "run", train__exit_iteration="2")) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    code = tmp_path / "code"
    target = (arguments(tmp_path / "run"), 60_000, str(code))
    process = multiprocessing.get_context("fork").Process(target=_train_with_little_room, args=target)
    process.start()
    process.join()
    assert int(code.read_text()) == 5
    shown = capfd.readouterr().err
    assert "error: " in shown
    assert "iter_0000004" in shown
    assert "Traceback" not in shown
    after = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    assert after == before
    assert run(arguments(tmp_path / "run")) == 0, "with room again the same command goes on"


def test_debug_shows_the_traceback(tmp_path) -> None:
    from mt_core.errors import ConfigError

    with pytest.raises(ConfigError):
        run(arguments(tmp_path / "run", model__num_layers="0"), debug=True)


@pytest.mark.parametrize(
    "setting",
    [
        "train.loss=nobody",
        'train.callbacks=["nobody"]',
        'logging.trackers=["nobody"]',
        "parallel.pipeline_schedule=nobody",
        "lr_schedule.lr_decay_style=nobody",
        "optimizer.optimizer=nobody",
        "data.dataset_type=nobody",
        "tokenizer.tokenizer_type=nobody",
    ],
)
def test_a_dry_run_finds_names_that_nobody_registers(mt, setting) -> None:
    outcome = mt("train", "--dry-run", "--set", setting)
    assert outcome.code != 0
    assert f"{setting.partition('=')[0]}=nobody" in outcome.err
