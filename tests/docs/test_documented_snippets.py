"""Python snippets of the documentation run, and TOML blocks are configuration."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import tomllib
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tests.docs.blocks import Block, blocks

from mt_core.config.loading import load_config_anywhere, load_sections
from mt_core.config.sections import section_types
from mt_core.plugins import PluginHost, load_plugins

NOT_RUN = {
    "def write_shard(path": "tests/eval/test_vqa.py draws these shapes",
    "# A sheet of answers": "tests/eval/test_vqa.py draws it",
    "def name_map(config: GptOssConfig)": "a part of mt_models/gpt_oss/hugging_face.py",
    "# sink_model/": "files of a plugin; test_documented_model.py makes and runs it",
    "class SelfAttention(nn.Module)": "a part of mt_models/blocks/attention.py",
    "build_parallel_context(AxisSizes(cp=4))": "needs four ranks",
    'IndexedDataset("corpus_text_document")': "needs a corpus; tests/models/test_retro.py does the same",
    "def convert_checkpoint(path, source": "the shape of a saver; examples and tests have whole ones",
    "http://valley.example/bridges": "tests/data/corpora/test_building_corpora_page.py runs the page",
    "import RunOptions, clean, preset": "tests/data/corpora/test_building_corpora_page.py runs the page",
    "workers may import the script": "starts processes that import the script",
    "exit_code = launch(8": "starts eight processes; tests/dist/test_launch_local.py does so",
    'with rank_session("cuda", run_dir=': "needs a GPU, and the reader's own step",
    'Path("gpt/checkpoints")': "needs a checkpoint of Megatron's; tests/ckpt/megatron reads some",
    "facts/retro": "needs the project of the page; tests/eval/test_qa.py runs it",
    "wiki/retro": "needs a text of the reader's; tests/retrieval/retro builds projects",
    "runs/retro": "needs a trained run; tests/models/test_retro.py does the same",
    "runs/llava": "needs a trained run; tests/models/test_llava.py does the same",
    "mine = stages_of_rank(": "a model and ranks of the reader's",
    "runs/llama/checkpoints": "needs a trained run; tests/moe does the same",
    "model.state_dict().items()": "a model of the reader's",
    "differences = compare(record(small)": "trains twice; tests/tools/verify does so",
    "siglip-base-patch16-224": "a model of 93 M weights; tests/models/test_vision.py builds small ones",
    'TextSet("valid"': "needs a text of the reader's; tests/eval does the same",
    "a-hf": "test_documented_commands.py converts the same run",
    "runs/chat-reward": "needs a trained run; tests/tune/test_reward_models.py does the same",
    "episode.after(": "needs a chat model; tests/tune/environments/test_episodes.py has such episodes",
    "# my_losses/": "files of a plugin; test_documented_plugin.py makes and runs it",
    "# my_hooks/": "files of a plugin; test_documented_hooks.py makes and runs it",
    "import my_losses.plugin": "test_documented_plugin.py runs it",
}
"""Text in a snippet -> why it is compiled and its imports are made, and no more."""

PYTHON = [block for block in blocks() if block.language == "python"]
TOML = [block for block in blocks() if block.language == "toml"]
YAML = [block for block in blocks() if block.language == "yaml"]
NO_CONFIGURATION = {"[project]": "a distribution's pyproject.toml", "# 1. Token files": "alternatives of [data]"}


def reason_not_run(block: Block) -> str | None:
    return next((reason for text, reason in NOT_RUN.items() if text in block.text), None)


def place(block: Block) -> str:
    return block.place


def test_no_entry_of_the_table_is_stale() -> None:
    everything = "\n".join(block.text for block in PYTHON)
    assert [text for text in NOT_RUN if text not in everything] == []


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset that snippets train is small here, and its runs short."""
    from mt_models.gpt.config import PRESETS

    tiny = PRESETS["gpt-tiny"]
    sections = {
        "model": {**tiny["model"], "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
        "data": {**tiny["data"], "seq_length": 64, "corpus_bytes": 1_000_000},
        "train": {**tiny["train"], "train_iters": 2, "micro_batch_size": 2, "eval_iters": 1, "sample_prompt": None},
        "lr_schedule": {},
        "logging": {"progress": "none"},
    }
    monkeypatch.setitem(PRESETS, "gpt-tiny", {**tiny, **sections})


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON if not reason_not_run(block)}))
def test_the_snippets_of_a_page_run(page: str, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, in one folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[train]\ntrain_iters = 2\n")
    (tmp_path / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]}\n'
    )
    snippets = ModuleType("snippets")
    monkeypatch.setitem(sys.modules, "snippets", snippets)  # where dataclasses look for their module
    for block in (block for block in PYTHON if block.page == page and not reason_not_run(block)):
        exec(compile(block.text, block.place, "exec"), vars(snippets))


@pytest.mark.parametrize("block", [block for block in PYTHON if reason_not_run(block)], ids=place)
def test_a_snippet_that_is_not_run_imports_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mt_"):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("block", TOML, ids=place)
def test_toml_is_configuration(block: Block, host: PluginHost, tmp_path: Path) -> None:
    values = tomllib.loads("\n".join(_first_alternative(block.text)))
    if any(block.first_line.startswith(text) for text in NO_CONFIGURATION):
        return
    path = tmp_path / "block.toml"
    path.write_text(block.text)
    assert values.keys() - {"preset"} <= section_types(host).keys()
    if {"preset", "train"} <= values.keys() and "train_iters" in values["train"]:
        load_config_anywhere(path, host=host)
    else:
        load_sections(
            [name for name in section_types(host) if name in values and name not in ("model", "checkpoint")],
            path,
            host=host,
        )


@pytest.mark.parametrize("block", YAML, ids=place)
def test_yaml_is_configuration(block: Block, host: PluginHost, tmp_path: Path) -> None:
    path = tmp_path / "block.yaml"
    path.write_text(block.text)
    load_config_anywhere(path, host=host)


def _first_alternative(text: str) -> list[str]:
    """Alternatives of one key, of which a file has one, cannot stand in one TOML text."""
    return [] if text.startswith("# 1. ") else text.splitlines()
