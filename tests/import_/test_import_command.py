"""`mt import` and `mt train --megatron-args` as a user types them, and what is wrong with what they are given."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.command_on_ranks import fork_ranks
from tests.import_.conftest import SCRIPTS

from mt_cli.main import run
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_import.readers.megatron import MegatronOptions, import_words
from mt_import.sources import import_file

TINY_TEXT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--eval-iters 1 --eval-interval 2 --log-interval 1"
)
TINY = TINY_TEXT.split()


def test_a_configuration_goes_to_a_file_or_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(SCRIPTS / "tiny.sh")
    assert run(["import", script, "-o", str(tmp_path / "run.toml"), "--define", "OUT=here"]) == 0
    report = capsys.readouterr().out
    assert "--num-layers 2" in report
    assert "model.num_layers = 2" in report
    assert report.rstrip().endswith(f"mt train {tmp_path / 'run.toml'}")
    assert run(["import", script, "--define", "OUT=here"]) == 0
    printed = capsys.readouterr()
    assert "model.num_layers = 2" in printed.err
    assert tomllib.loads(printed.out) == tomllib.loads((tmp_path / "run.toml").read_text())
    assert run(["import", script, "--json", "--define", "OUT=here"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ok"]
    assert values["config"]["checkpoint"] == {"save": "here", "save_interval": 2}
    assert {one["status"] for one in values["arguments"]} == {"translated", "default"}


def test_what_cannot_be_done_stops_unless_it_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run.json"
    words = ["--megatron-args", *TINY, "--optimizer-cpu-offload", "--use-mup"]
    assert run(["import", "-o", str(output), "--allow", "use-mup", *words]) == 1
    printed = capsys.readouterr()
    assert "--optimizer-cpu-offload" in printed.out
    assert "the optimizer's state in host memory" in printed.out
    assert "1 cannot be done" in printed.err
    assert not output.exists()
    assert run(["import", "-o", str(output), "--allow", "use-mup", "--allow", "optimizer-cpu-offload", *words]) == 0
    assert json.loads(output.read_text())["checkpoint"] == {"save_interval": None}


@pytest.mark.slow
def test_an_imported_script_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["import", str(SCRIPTS / "tiny.sh"), "-o", "tiny.toml", "--define", "OUT=saved"]) == 0
    assert run(["train", "tiny.toml"]) == 0
    assert losses(Path("runs/tiny"))
    assert [path.name for path in Path("saved").glob("iter_*")] == ["iter_0000002"]


@pytest.mark.slow
def test_megatrons_arguments_are_trained_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process and in two, which a launcher starts with the translated file."""
    fork_ranks(monkeypatch)
    one, two = tmp_path / "one", tmp_path / "two"
    words = ["--megatron-args", *TINY, "--global-batch-size", "4", "--hidden-dropout", "0", "--attention-dropout", "0"]
    assert run(["train", "--run-dir", str(one), *words]) == 0
    assert run(["train", "--nproc", "2", "--run-dir", str(two), *words]) == 0
    assert losses(one) == pytest.approx(losses(two), rel=1e-5)
    assert run(["train", "--preset", "gpt-tiny", *words]) == 2
    assert "--preset and --megatron-args both say what to train" in capsys.readouterr().err


def losses(directory: Path) -> list[float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


BAD_WORDS = {
    "--num-layer 2": '--num-layer is no option of Megatron\'s (did you mean "--num-layers"?)',
    "--hidden-size wide": "--hidden-size wide: expected an integer",
    "--lr": "--lr takes one number, got none",
    "--bf16 yes": "--bf16 takes no value, and yes follows it",
    "--optimizer adamw": "--optimizer adamw: it can be adam, sgd, muon",
    "--rampup-batch-size 2 2": "--rampup-batch-size takes 3 integers, got 2: 2 2",
    "--moe-layer-freq [0]*x": "--moe-layer-freq='[0]*x' has 'x'",
    "--window-size 4": "--window-size 4: expected two integers",
    "--fp16 --bf16": "--fp16 and --bf16 contradict one another: a run has one dtype",
    "--train-samples 10": "--train-iters counts iterations and --train-samples samples",
    "--lr-warmup-fraction 0.1 --lr-warmup-iters 2": "--lr-warmup-fraction and --lr-warmup-iters both say",
    "--data-path x": "--mock-data and --data-path both name the data",
    "--recompute-granularity full": "needs --recompute-method uniform or block",
    "--recompute-activations --recompute-method block": "counts only with --recompute-granularity full",
    "--overlap-param-gather": "--overlap-param-gather needs --use-distributed-optimizer",
    "--start-weight-decay 0.1": "--start-weight-decay counts only with --weight-decay-incr-style",
    "--weight-decay-incr-style linear": "needs --start-weight-decay and --end-weight-decay",
    "--num-attention-heads 5": "--num-attention-heads 5 does not divide --hidden-size 32",
    "--seq-length 64": "--seq-length 64 is longer than --max-position-embeddings 16",
    "--min-lr 1": "--min-lr 1.0 is above --lr 0.001",
    "--save x": "--save needs --save-interval",
    "--context-parallel-size 3": "--seq-length 16 has to be a multiple of 2 x --context-parallel-size, 6",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3": "use a multiple of 6",
    "--position-embedding-type mrope": "position_embedding_type='mrope' is not read",
    "--tensor-model-parallel-size 3": "= 3 does not divide the 4 processes of the run",
}


@pytest.mark.parametrize("words", BAD_WORDS)
def test_bad_arguments(words: str, host: PluginHost) -> None:
    with pytest.raises(ConfigError) as error:
        import_words([*TINY, *words.split()], host, MegatronOptions(world_size=4))
    assert BAD_WORDS[words] in str(error.value)


def test_everything_that_is_wrong_is_reported_at_once(host: PluginHost) -> None:
    with pytest.raises(ConfigError) as error:
        import_words(["--seq-length", "8"], host)
    assert len(str(error.value).splitlines()) == 2
    assert "--num-layers, --hidden-size, --num-attention-heads, --max-position-embeddings" in str(error.value)


def test_scopes_of_cuda_graphs(host: PluginHost) -> None:
    words = {"local": "blocks", "full_iteration": "step"}
    for given, scope in words.items():
        assert import_words([*TINY, "--cuda-graph-impl", given], host).sections["train"]["cuda_graphs"] == scope


SEVERAL_RANKS = "--tensor-model-parallel-size 2 --use-distributed-optimizer"
TRANSLATED = {
    f"{SEVERAL_RANKS} --high-priority-stream-groups dp_cp tp pp ep_dp": {
        "parallel.nccl_communicators": {
            "shard": {"is_high_priority_stream": True},
            "tp": {"is_high_priority_stream": True},
        }
    },
    "--pipeline-model-parallel-size 1 --high-priority-stream-groups pp": {},
    "--use-nccl-ub": {"parallel.nccl_ub": True},
    "--distributed-timeout-minutes 90": {
        **{f"timeouts.{phase}": 5400.0 for phase in ("init", "data", "load", "step", "evaluate", "save")}
    },
    "--distributed-timeout-minutes 2": {"timeouts.init": 120.0, "timeouts.step": 120.0},
    "--distributed-timeout-minutes 10": {},
    f"{SEVERAL_RANKS} --bf16 --use-precision-aware-optimizer": {"optimizer.main_weights": "remainders"},
    "--use-megatron-fsdp --bf16 --use-precision-aware-optimizer": {},
}


@pytest.mark.parametrize("words", TRANSLATED)
def test_options_of_communication_and_of_the_optimizer(words: str, host: PluginHost) -> None:
    """An option that says what is so without it decides no key."""
    result = import_words([*TINY, *words.split()], host, MegatronOptions(world_size=4))
    last = [one for one in result.accounts if not one.words.startswith("--use-distributed")][-1]
    assert last.status == ("translated" if TRANSLATED[words] else last.status)
    assert dict(last.keys if last.status == "translated" else {}) == TRANSLATED[words]


STARTS = {
    "--no-load-optim": ({"load": "old"}, ["--no-load-optim without --finetune: Megatron goes on at the iteration of"]),
    "--finetune --no-load-optim": ({"load": "old"}, []),
    "": ({}, ["--load and --save both name old: the run goes on"]),
    "--no-save-optim": (
        {"save_optimizer": False},
        ["--no-save-optim, and --load and --save both name old"],
    ),
    "--no-save-optim --no-load-optim": (
        {"save_optimizer": False, "load": "old"},
        ["--no-save-optim, and --load and --save both name old"],
    ),
}


@pytest.mark.parametrize("words", STARTS)
def test_a_run_that_starts_elsewhere_than_megatrons_says_so(words: str, host: PluginHost) -> None:
    save = ["--load", "old", "--save", "old", "--save-interval", "100"]
    result = import_words([*TINY, *save, *words.split()], host)
    keys, notes = STARTS[words]
    assert {key: value for key, value in result.sections["checkpoint"].items() if key != "save"} == keys
    found = [note for note in result.notes if "load" in note]
    assert [note[:40] for note in found] == [note[:40] for note in notes]
    dropped = [one.reason for one in result.of_status("no effect") if one.words == "--save old"]
    assert ["run directory" in reason for reason in dropped] == [True] * ("load" in keys)


REFUSED = {
    "--optimizer soap": "this optimizer; optimizer.optimizer can be adam, lion, muon, sgd",
    "--tokenizer-type MultimodalTokenizer": "this tokenizer; tokenizer.tokenizer_type can be BertWordPieceCase",
    "--recompute-activations --recompute-modules router": "recomputation of router",
    "--bf16 --fp8-format hybrid --fp8-recipe custom": "this recipe; precision.fp8_recipe can be tensorwise",
    "--bf16 --fp4-format e2m1 --fp4-recipe custom": "this recipe; precision.fp8_recipe can be nvfp4",
    "--dataloader-type cyclic": "a loader that orders samples by itself",
    "--use-precision-aware-optimizer --exp-avg-dtype bf16": "moments of two dtypes",
    "--cp-comm-type p2p a2a": "another way to exchange keys in each layer",
    "--num-experts 2 --moe-router-load-balancing-type quantile_balancing": "quantile balancing",
    "--nccl-communicator-config-path nccl.yaml": "write those of each group as parallel.nccl_communicators.<axis>",
    "--high-priority-stream-groups tp embd": "communicators of embd; parallel.nccl_communicators has axes for tp, cp",
    "--use-sharp": "NCCL_COLLNET_ENABLE=1",
    "--distributed-timeout-seconds-after-init 60": "timeouts.step is that of every step",
    "--num-experts 2 --moe-expert-rank-capacity-factor 1.5": "static_shape=true and expert_rank_capacity_factor",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_done_is_named(words: str, host: PluginHost) -> None:
    refused = import_words([*TINY, *words.split()], host).of_status("refused")
    assert [REFUSED[words] in one.reason for one in refused] == [True]


BAD_FILES = {
    "a.yaml": ("distributed_type: FSDP\n", "distributed_type=FSDP is not read; it can be MEGATRON_LM"),
    "b.yaml": (
        "distributed_type: MEGATRON_LM\nnum_process: 1\n",
        "num_process is no key of Accelerate's (did you mean",
    ),
    "c.yaml": ("megatron_lm_config: {megatron_lm_tp_degre: 1}\n", "megatron_lm_tp_degre is no key"),
    "d.yaml": ("a: 1\n", "is neither Accelerate's"),
    "e.yaml": ("trainer: {}\nmodel:\n  num_layers: ???\n", "model.num_layers is ???, a value that has to be given"),
    "f.yaml": ("trainer: {}\nmodel: {num_layers: '${.x}'}\n", "model.num_layers refers to model.x, which is not there"),
    "h.yaml": (
        "trainer: {}\nmodel: {num_layers: '${.x}', x: '${multiply:${model.y},2}', y: '${.x}'}\n",
        "model.x refers to itself: model.x -> model.y -> model.x; give one of them a value",
    ),
    "i.yaml": (
        "trainer: {}\nmodel: {num_layers: '${multiply:${.x},2}', x: wide}\n",
        "model.num_layers multiplies ${.x}, which is 'wide' and no whole number",
    ),
    "g.yaml": ("- 1\n", "got a list, expected keys and values"),
    "h.sh": ("torchrun pretrain_vlm.py --num-layers 1\n", "Megatron needs them"),
    "i.sh": ("torchrun pretrain_gpt.py --num-layers $L\n", "--num-layers $L: $L is not set in the script"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name: str, tmp_path: Path, host: PluginHost) -> None:
    text, message = BAD_FILES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        import_file(tmp_path / name, host)
    assert message in str(error.value)


BAD_COMMANDS = {
    ("nothing.sh",): "nothing.sh does not exist",
    (): "give mt import one thing",
    ("--accelerate-env", "--megatron-args", "--bf16"): "give mt import one thing",
    ("-o", "x.yaml", "--megatron-args", *TINY): "the name can end in .toml or .json",
    (
        "--entry",
        "gtp",
        "--megatron-args",
        *TINY,
    ): 'it can be gpt, bert, t5, hybrid, retro, ict, vlm, rl, vision (did you mean "gpt"?)',
}


@pytest.mark.parametrize("arguments", BAD_COMMANDS)
def test_bad_commands(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", *arguments]) == 2
    assert BAD_COMMANDS[arguments] in capsys.readouterr().err.replace("\n       ", " ")


@pytest.mark.slow
def test_importing_needs_no_torch() -> None:
    """A machine that only prepares runs has none, and importing it takes seconds."""
    code = (
        "import sys; sys.modules['torch'] = None; from mt_cli.main import run; "
        f"sys.exit(run(['import', {str(SCRIPTS / 'tiny.sh')!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
