"""`mt config init`: which questions are asked, how answers are checked, and what is written."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mt_cli.wizard import make_draft
from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.plugins import load_plugins

SMALL = (
    "train.eval_interval=null",
    "train.eval_iters=1",
    "train.sample_prompt=null",
    "data.corpus_bytes=1000000",
    "lr_schedule.lr_warmup_iters=1",
)


def asked(answers: dict[str, list[str]], given: dict[str, str] | None = None, *, has_gpu: bool = False) -> Any:
    """(questions that were asked, their texts, problems that were reported, the draft). answers: by question, in order;
    others take the default."""
    texts: dict[str, str] = {}
    problems: list[str] = []
    by_text = [("Model", "model"), ("Data", "data"), ("Tokenizer", "tokenizer"), ("Samples of a m", "micro-batch-size")]
    by_text += [("Samples of a s", "global-batch-size"), ("Samples", "dataset-type"), ("Sequence", "seq-length")]
    by_text += [("Processes", "processes"), ("Tensor", "tensor-parallel"), ("Pipeline", "pipeline-parallel")]
    by_text += [("Expert", "expert-parallel"), ("Steps", "steps")]

    def ask(text: str, default: str) -> str:
        name = next(name for start, name in by_text if text.splitlines()[-1].startswith(start))
        texts[name] = text
        assert len(problems) < 10, problems
        return answers[name].pop(0) if answers.get(name) else default

    draft = make_draft(load_plugins(), has_gpu, given or {}, ask, problems.append)
    return list(texts), texts, problems, draft


def test_one_process_gets_no_questions_about_layouts() -> None:
    names, _, problems, draft = asked({})
    assert names == [
        "model",
        "data",
        "tokenizer",
        "seq-length",
        "processes",
        "micro-batch-size",
        "global-batch-size",
        "steps",
    ]
    assert problems == []
    assert tomllib.loads(draft.toml())["preset"] == "gpt-tiny"


def test_legal_degrees_are_listed_and_others_refused() -> None:
    """gpt-tiny has 4 heads and 4 layers."""
    answers = {
        "processes": ["8"],
        "tensor-parallel": ["8", "two", "2"],
        "pipeline-parallel": ["3", "2"],
        "micro-batch-size": ["4"],
        "global-batch-size": ["12", "16"],
    }
    names, texts, problems, draft = asked(answers)
    assert "Tensor parallel (1, 2 or 4)" in texts["tensor-parallel"]
    assert "Pipeline parallel (1, 2 or 4)" in texts["pipeline-parallel"]
    assert "a multiple of 8" in texts["global-batch-size"]
    assert "expert-parallel" not in names
    assert len(problems) == 4
    assert "it can be 1, 2 or 4" in problems[0]
    assert "two: expected a whole number" in problems[1]
    assert "the nearest legal values are 8 or 16" in problems[3]
    values = tomllib.loads(draft.toml())
    assert values["parallel"] == {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True,
    }
    assert values["train"] == {"micro_batch_size": 4, "global_batch_size": 16, "train_iters": 450}


def test_experts_are_divided_where_there_are_some() -> None:
    _, texts, _, draft = asked({"model": ["mixtral-8x7b"], "processes": ["4"], "expert-parallel": ["4"]}, has_gpu=True)
    assert "Expert parallel (1, 2 or 4)" in texts["expert-parallel"]
    values = tomllib.loads(draft.toml())
    assert values["parallel"]["expert_model_parallel_size"] == 4
    assert values["precision"] == {"dtype": "bf16"}


LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"intermediate_size": 48, "vocab_size": 301, "max_position_embeddings": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder without weights."""
    config = transformers.LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def loaded(draft: Any, path: Path) -> Any:
    path.write_text(draft.toml())
    with as_world(draft.processes):
        return load_config(path)


def test_a_folder_gives_its_model_and_its_weights_where_it_has_some(folder: Path, tmp_path: Path) -> None:
    *_, draft = asked({"model": [str(folder)]})
    config = loaded(draft, tmp_path / "a.toml").config
    assert (config.model.family, config.model.hidden_size, config.data.seq_length) == ("llama", 32, 64)
    assert config.checkpoint.load is None
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    *_, draft = asked({"model": [str(folder)]})
    assert tomllib.loads(draft.toml())["checkpoint"] == {"load": str(folder)}
    assert loaded(draft, tmp_path / "b.toml").config.model == config.model


def test_files_need_a_tokenizer_and_a_kind_of_samples(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n' * 50)
    answers = {
        "data": [str(tmp_path / "none"), str(tmp_path / "text.jsonl")],
        "tokenizer": [str(tmp_path), "bytes"],
        "dataset-type": ["t5", "gpt"],
    }
    names, _, problems, draft = asked(answers)
    assert names[:4] == ["model", "data", "tokenizer", "dataset-type"]
    assert "no such text file" in problems[0]
    assert "no tokenizer is there" in problems[1]
    assert "t5 gives no tokens, which model.family=gpt takes; bert," in problems[2]
    assert tomllib.loads(draft.toml())["data"]["data_path"] == [str(tmp_path / "text.jsonl")]
    assert tomllib.loads(draft.toml())["data"]["dataset_type"] == "gpt"


def test_files_may_have_weights(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n' * 50)
    path = str(tmp_path / "text.jsonl")
    *_, draft = asked({}, {"data": f"0.3 {path} 2 {path}", "tokenizer": "bytes"})
    assert [(entry.prefix, entry.weight) for entry in loaded(draft, tmp_path / "a.toml").config.data.data_path] == [
        (path, 0.3),
        (path, 2.0),
    ]


# -- the command --------------------------------------------------------------------------------------


def test_options_answer_everything_and_the_file_trains(mt, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    options = [
        "--model",
        "gpt-tiny",
        "--seq-length",
        16,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        2,
        "--steps",
        2,
    ]
    outcome = mt("config", "init", out, "--yes", *options)
    assert outcome.code == 0, outcome.err
    assert "the fullest rank holds" in outcome.out  # mt plan
    if not torch.cuda.is_available():
        assert "GiB of this CPU" in outcome.out
        assert not re.search("h100|FLOP/s", outcome.out), "of another machine"
    assert f"mt train {out}" in outcome.out
    small = [part for setting in SMALL for part in ("--set", setting)]
    assert mt("train", out, "--run-dir", tmp_path / "run", *small).code == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["iteration"] == 2
    again = mt("config", "init", out, "--yes")
    assert (again.code, "exists; give another name, or --force" in again.err) == (2, True)


def test_typed_answers(mt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong answer is reported, and its question asked again; options are not asked."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("gpt-tinny\ngpt-tiny\nmock\n-1\n32\n\n\n\n7\n"))
    outcome = mt("config", "init", tmp_path / "a.toml", "--processes", 1)
    assert outcome.code == 0, outcome.err
    assert "preset gpt-tinny is unknown" in outcome.err
    assert "-1: expected a whole number above 0" in outcome.err
    assert "Processes" not in outcome.out
    values = tomllib.loads((tmp_path / "a.toml").read_text())
    assert (values["data"]["seq_length"], values["data"]["dataset_type"]) == (32, "mock")


def test_without_mt_tools_the_file_is_written_all_the_same(mt, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MT_PLUGINS", "core,models,data,ckpt,cli")
    outcome = mt("config", "init", tmp_path / "a.toml", "--yes")
    assert outcome.code == 0, outcome.err
    assert "pip install mt-tools" in outcome.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "gpt-tinny"], "preset gpt-tinny is unknown"),
        (["--model", "FOLDER"], "cannot be read as the config.json of a model"),
        (["--data", "none.jsonl"], "no such text file"),
        (
            ["--model", "bert-base-cased"],
            "gives no tokentype_ids and padding_mask, which model.family=bert takes; bert,",
        ),
        (["--tokenizer", "none"], "no tokenizer is there"),
        (["--processes", "4", "--tensor-parallel", "3"], "it can be 1, 2 or 4"),
        (["--global-batch-size", "5", "--micro-batch-size", "2"], "the nearest legal values are 4 or 6"),
        (["--seq-length", "0"], "0: expected a whole number above 0"),
    ],
)
def test_bad_options(mt, tmp_path: Path, options: list[str], words: str) -> None:
    places = [str(tmp_path) if option == "FOLDER" else option for option in options]
    outcome = mt("config", "init", tmp_path / "a.toml", "--yes", *places)
    assert outcome.code == 2
    assert words in " ".join(outcome.err.split())
    assert not (tmp_path / "a.toml").exists()


@pytest.mark.slow
def test_a_dialogue_on_a_terminal(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", "from mt_cli.main import main; main()", "config", "init", str(tmp_path / "a.toml")]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True)
    os.close(terminal)
    dialogue = [("[gpt-tiny]:", ""), ("[builtin]:", "mock"), ("Sequence length", "x"), ("Sequence length", "64")]
    dialogue += [
        ("Processes", "2"),
        ("Tensor parallel (1 or 2)", "2"),
        ("micro-batch", "2"),
        ("of a step", ""),
        ("Steps", "9"),
    ]
    seen = ""
    for prompt, answer in dialogue:
        seen = read_until(controller, prompt)
        os.write(controller, f"{answer}\n".encode())
    seen = read_until(controller, "--nproc 2")
    with suppress(OSError):  # the terminal has ended with the process
        while os.read(controller, 4096):
            pass
    assert process.wait(timeout=300) == 0
    os.close(controller)
    values = tomllib.loads((tmp_path / "a.toml").read_text())
    assert values["data"] == {"dataset_type": "mock", "seq_length": 64}
    assert values["parallel"]["tensor_model_parallel_size"] == 2
    assert values["train"]["train_iters"] == 9
    assert "which fits into" in seen


def read_until(terminal: int, words: str, seconds: float = 90) -> str:
    text, end = "", time.monotonic() + seconds
    while words not in text:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"no {words!r} in {text!r}"
        text += os.read(terminal, 4096).decode(errors="replace")
    return text
