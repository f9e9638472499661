"""Every command in the documentation has options that exist and a configuration that holds; what is small is run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tests.command_on_ranks import fork_ranks
from tests.docs.blocks import ROOT, SHELL, Command, blocks, commands, mt_commands

from mt_cli.app import build_group
from mt_cli.commands.train import DEFAULT_PRESET
from mt_cli.main import run
from mt_core.config.loading import load_config_anywhere
from mt_core.plugins import PluginHost, load_plugins

CONFIGURED = {("train",), ("plan",), ("verify", "layout"), ("verify", "resume"), ("config", "validate")}
"""Commands whose configuration is loaded in place of a run: training, and what starts several processes or plans for
many; their own tests run them."""

PARSED = {
    ("import",): "reads scripts and files of others; tests/import_ runs it",
    ("serve",): "runs until it is ended; tests/infer/server runs it",
    ("retrieve",): "needs a trained retriever; tests/retrieval trains one and runs it",
    ("retro",): "needs token files; tests/retrieval/retro makes some and runs it",
    ("chat",): "asks for lines; tests/infer/server/test_chat_command.py runs it",
    ("bench",): "measures for minutes; tests/tools/bench runs it",
    ("moe",): "draws what a training run of an MoE model has logged; tests/moe runs it",
    ("models",): "counts the parameters of every preset; tests/cli/test_models_command.py runs it",
    ("tune",): "trains; tests/tune/sft runs it",
    ("ctl",): "asks a run that trains; tests/ops/test_ctl.py runs one",
    ("profile",): "trains and records; tests/tools/test_profile.py runs it",
    ("compare",): "reads runs of the reader's; tests/ops runs it",
    ("plot",): "reads runs of the reader's; tests/ops runs it",
    ("watch",): "runs until it is ended; tests/ops runs it",
    ("report",): "reads runs of the reader's; tests/ops runs it",
    ("doctor",): "looks at the machine in processes of its own; tests/cli/test_doctor_command.py runs it",
}

NOT_RUN = {
    r"\.gguf|SmolLM2-gguf": "a published file; tests/ckpt/test_gguf_save.py makes some",
    r"s3://": "needs an object store",
    r"mt launch ": "needs a script; tests/accelerate/test_data_sets_and_launch.py runs one",
    r"mt eval ": "reads files of the reader's; tests/eval and tests/peer run them",
    r"mt generate runs/first --input \w+\.jsonl --output (answers|programs|texts)": "reads prompts of the reader's",
    r"mt generate runs/(t5|llava)": "needs a trained run; tests/infer/test_conditioned_prompts.py makes small ones",
    r"mt generate (SmolVLM|InternVL3)": "a published model; tests/infer/server/test_image_tiles.py makes small ones",
    r"config init( |$)(?!.*--yes)": "asks questions; tests/cli/test_config_init.py answers them",
    r"--load-dir (llama-hf|hybrid-hf|MODEL|outputs/checkpoint)": "needs a checkpoint that we have none of",
    r"--load-dir (gpt-oss-20b|gpt/checkpoints|runs/llama|a )": "needs a checkpoint that we have none of",
    r"Mistral-Large-3": "a published model; tests/ckpt/test_convert_mistral_large.py makes small ones",
    r"DeepSeek-V3|Llama-3\.1-8B-FP8|mt quantization llama-int4": "tests/ckpt/quantized makes small ones",
    r"mt rollouts runs/": "needs a run that drew completions; tests/tune/rl reads some",
    r"runs/rounded": "a run with [quantize]; tests/tune/quantized_training trains and exports some",
    r"mt calibrate ": "takes minutes; tests/tools/calibration calibrates small models",
    r"bart-base|runs/bart|Qwen3\.5-9B": "a published model; tests/ckpt/family_cases.py has small ones",
    r"--saver meta": "holds Llama only; tests/ckpt/test_convert_meta_target.py runs it",
    r"--tokenizer-type GPT2BPETokenizer": "needs OpenAI's vocabulary",
    r"\$i/4|\{00000": "in a shell loop; tests/data/preprocess/test_preprocess_machines.py does the same",
    r"mt ckpt add-tokens": "needs a Hugging Face folder; tests/ckpt/test_added_tokens.py makes some",
    r"--saver peft|mt generate adapter": "needs a run with an adapter; tests/tune/adapters makes some",
    r"mt ckpt merge": "needs models of one architecture; tests/ckpt/merging makes some",
    r"load-dir runs/tuned --saver hf": "needs a run of the page; tests/tune/sft trains one",
    r"load-dir runs/chat-reward": "needs a run of the page; tests/tune/test_reward_models.py trains one",
    r"mt data preview sft\.toml": "needs a file of the reader's; docs/data/task-datasets.md has one",
    r"trtllm": "engine inputs of a GPT-2 are refused at this size; tests/ckpt/test_convert_trtllm.py runs it",
}
TUTORIALS = "test_tutorials.py types the whole page"
PAGES_RUN_ELSEWHERE = {
    "docs/tutorials/assistant.md": "tests/docs/test_assistant_example.py, in its short form",
    "docs/tutorials/accelerate-script.md": TUTORIALS,
    "docs/tutorials/hugging-face.md": TUTORIALS,
    "docs/tutorials/many-ranks.md": TUTORIALS,
    "docs/tutorials/megatron-run.md": TUTORIALS,
    "docs/tutorials/own-text.md": TUTORIALS,
    "docs/tutorials/plugin.md": TUTORIALS,
    "docs/guides/multimodal.md": "tests/eval/test_vqa.py",
    "docs/guides/instruct-retro.md": "tests/eval/test_qa.py",
    "docs/data/building-corpora.md": "tests/data/corpora/test_building_corpora_page.py",
    "docs/models/bert.md": "tests/models/test_bert_training.py, on the data that the page makes",
    "docs/guides/retriever.md": "tests/retrieval runs each step on a smaller world; the whole page takes 15 minutes",
    "docs/guides/retro.md": "tests/eval/test_qa.py",
    "docs/models/biencoder.md": "tests/models/test_biencoder.py, on the data that docs/models/bert.md makes",
}

NOT_CONFIGURED = {
    r"mt train pretrain\.toml": "a file of examples/assistant; test_assistant_example.py trains it",
    r"adapter\.load=(adapter|bridge-run)": "starts from a folder of the page; tests/tune/adapters has some",
    r"adapter\.base=nf4 --run-dir": "starts from a folder; tests/tune/adapters/test_quantized_base.py makes some",
    r"checkpoint\.load=DeepSeek-V3": "a published model; tests/ckpt/quantized/test_models.py loads small ones",
    r"s3://": "needs an object store",
    r"mt launch ": "needs a script; tests/accelerate/test_data_sets_and_launch.py runs one",
    r"triton|liger|cuda_graphs|fp8": "needs a GPU's kernels",
    r"facts-(retro|sft)": "starts from a run of docs/guides/retro.md; tests/eval/test_qa.py trains all of them",
    r"preset retro-tiny": "starts from a GPT of four layers; tests/models/test_partial_load.py has smaller ones",
    r"mt train llama\.toml": "a file that mt import writes; tests/import_ does so",
    r"loss=focal": "needs the plugin of the page; test_documented_plugin.py runs it",
    r"my_counter": "needs the plugin of the page; test_documented_hooks.py runs it",
    r"preset sinks-tiny": "needs the plugin of the page; test_documented_model.py runs it",
}

SMALL = {
    "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "position_embedding_type": "rope"},
    "data": {"seq_length": 128, "corpus_bytes": 1000000},
    "train": {"micro_batch_size": 2, "train_iters": 2, "eval_interval": None, "eval_iters": 1, "sample_prompt": None},
    "checkpoint": {"save_interval": 1},
    "logging": {"progress": "none"},
}


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name: the recipes, a file of one's own, runs."""
    place = tmp_path_factory.mktemp("docs")
    (place / "examples").symlink_to(ROOT / "examples")
    (place / "docs").mkdir()
    for name in ("my.toml", "run.toml"):
        (place / name).write_text('preset = "gpt-tiny"\n')
    settings = [
        part
        for section, values in SMALL.items()
        for key, value in values.items()
        for part in ("--set", f"{section}.{key}={'null' if value is None else value}")
    ]
    assert run(["train", *settings, "--run-dir", str(place / "runs" / "gpt-tiny")]) == 0
    for name in ("a", "mine"):
        shutil.copytree(place / "runs" / "gpt-tiny", place / "runs" / name)
    return place


ALL = mt_commands()
SYNOPSES = [command for command in ALL if command.is_synopsis]
REAL = [command for command in ALL if not command.is_synopsis]


def ids(command: Command) -> str:
    return f"{command.block.place} {command.text[:50]}"


def test_there_are_commands() -> None:
    assert len(REAL) > 80
    assert len(SYNOPSES) > 8


@pytest.mark.parametrize("command", REAL, ids=ids)
def test_its_options_exist(command: Command, host: PluginHost) -> None:
    # An address in memory is parsed as one of S3 is, without the package of its scheme.
    parse([word.replace("s3://", "memory://") for word in command.words], host)


@pytest.mark.parametrize("command", SYNOPSES, ids=ids)
def test_a_synopsis_names_options_that_exist(command: Command, host: PluginHost) -> None:
    words = re.sub(r"[\[\]|]|\.\.\.", " ", command.text).split()[1:]
    names = [word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)]
    found = find_command(names, host)
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


def is_configured(command: Command) -> bool:
    named = any(tuple(command.words[: len(names)]) == names for names in CONFIGURED)
    named = named and PAGES_RUN_ELSEWHERE.get(command.block.page) != TUTORIALS
    return named and not any(re.search(pattern, command.text) for pattern in NOT_CONFIGURED)


@pytest.mark.parametrize("command", list(filter(is_configured, REAL)), ids=ids)
def test_its_configuration_holds(
    command: Command, host: PluginHost, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    values = parse(command.words, host)
    path = values.get("config")
    length = ["train.train_iters=1"] if command.words[0] == "plan" and path is None else []  # a plan needs none
    overrides = [*length, *(values.get("set_") or ()), *(values.get("against") or ()), *(values.get("then") or ())]
    load_config_anywhere(
        path, preset=values.get("preset"), overrides=overrides, host=host, default_preset=DEFAULT_PRESET
    )


def is_run(command: Command) -> bool:
    words = command.words
    if command.block.page in PAGES_RUN_ELSEWHERE or any(re.search(pattern, command.text) for pattern in NOT_RUN):
        return False
    return not any(tuple(words[: len(names)]) == names for names in (*CONFIGURED, *PARSED))


def pages_to_run() -> list[str]:
    return sorted({command.block.page for command in REAL if is_run(command)})


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_to_run())
def test_the_commands_of_a_page_run(
    page: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From top to bottom in one folder, what makes their inputs included."""
    monkeypatch.chdir(workplace)
    fork_ranks(monkeypatch)
    for block in (block for block in blocks() if block.page == page and block.language in SHELL):
        for command in commands(block):
            if command.is_mt and not command.is_synopsis and is_run(command):
                code = run(command.words)
                assert code == 0, f"{command.block.place}: {command.text}\n{capsys.readouterr()}"
            elif command.text.startswith(("printf ", "cat >")):
                subprocess.run(["bash", "-c", command.text], check=True)


def parse(words: list[str], host: PluginHost) -> dict[str, Any]:
    """The values of the parameters of the command that `mt WORDS` would run. Options that do not exist raise."""
    command, context, rest = build_group(host), None, list(words)
    while True:
        context = command.make_context("mt", rest, parent=context, **({} if context else {"obj": host}))
        command = context.command
        if not hasattr(command, "resolve_command"):
            return dict(context.params)
        _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])


def find_command(names: list[str], host: PluginHost) -> Any:
    found: Any = build_group(host)
    for name in names:
        if not hasattr(found, "commands") or name not in found.commands:
            break
        found = found.commands[name]
        found = found.load() if hasattr(found, "load") else found
    return found
