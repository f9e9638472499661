"""The tutorials, typed from top to bottom in an empty folder; trainings are short."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tests.command_on_ranks import fork_ranks
from tests.docs.blocks import SHELL, Command, blocks, commands

from mt_cli import main
from mt_core.plugins import Plugin, load_plugins

NOT_RUN = {
    r"^mt (serve|chat)": "runs until it is ended; tests/infer/server runs it",
    r"^mt launch": "starts processes; tests/accelerate/test_data_sets_and_launch.py runs it",
    r"^mt plan": "plans for many ranks; tests/tools/plan runs it",
    r"^mt verify": "trains in several layouts; tests/tools/verify runs it",
    r"^mt (ckpt inspect|convert .*) ?(--loader auto --load-dir )?runs/layout": "reads what mt launch has trained",
    r"^(uv|pip) ": "installs; tests/wheels does the same with a plugin",
    r"^curl": "asks the server; tests/infer/server asks it",
    r"^echo": "asks questions of a chat; tests/infer/server/test_chat_command.py does so",
}
"""What is not typed, and the reason."""

SHORT = {
    "train.train_iters": "2",
    "train.eval_iters": "1",
    "train.eval_interval": "null",
    "train.sample_prompt": "null",
    "checkpoint.save_interval": "1",
    "lr_schedule.lr_warmup_iters": "1",
    "logging.progress": "none",
}


def shortened(words: list[str]) -> list[str]:
    """The words of a command, with a short training in the place of the page's; a resumed one is a step longer."""
    if words[:1] != ["train"] or "--dry-run" in words:
        return words
    settings = {**SHORT, "train.train_iters": "3"} if any("accept_changes" in word for word in words) else SHORT
    accepted = 'checkpoint.accept_changes=["parallel.pipeline_model_parallel_size", "train.train_iters"]'
    assert accepted in words or settings is SHORT
    return [*words, *(part for key, value in settings.items() for part in ("--set", f"{key}={value}"))]


def typed(command: Command) -> None:
    words = command.text.split()
    if command.is_mt:
        assert main.run(shortened(command.words)) == 0, f"{command.block.place}: {command.text}"
    elif words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
    else:
        assert words[0] in ("cat", "mkdir", "sed"), f"{command.block.place}: {command.text}"
        subprocess.run(["bash", "-c", command.text], check=True)


def commands_of(page: str) -> list[Command]:
    shell = [block for block in blocks() if block.page == page and block.language in SHELL]
    every = [command for block in shell for command in commands(block)]
    return [one for one in every if not any(re.search(pattern, one.text) for pattern in NOT_RUN)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["own-text", "hugging-face", "megatron-run", "many-ranks", "accelerate-script"])
def test_a_tutorial_does_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fork_ranks(monkeypatch)
    # The reader's own file.
    Path("novel.txt").write_text("It was the best of times, it was the worst of times.\n" * 400)
    for command in commands_of(f"docs/tutorials/{name}.md"):
        typed(command)


@pytest.mark.slow
def test_the_tutorial_on_plugins_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    typing = commands_of("docs/tutorials/plugin.md")
    for command in typing:
        if not command.is_mt:
            typed(command)
    # In the place of an installation.
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("my_schedules")]:
        monkeypatch.delitem(sys.modules, name)
    host = load_plugins()
    import my_schedules.plugin  # type: ignore[import-not-found]

    host.add(my_schedules.plugin, Plugin("my-schedules", "my_schedules.plugin", "my-schedules", "1.0.0"))
    monkeypatch.setattr("mt_cli.commands.train.load_plugins", lambda: host)
    monkeypatch.setattr(main, "load_plugins", lambda **_: host)
    for command in typing:
        if command.is_mt:
            typed(command)
    assert "staircase" in (tmp_path / "runs" / "stairs" / "config.json").read_text()


def test_no_entry_of_the_table_is_stale() -> None:
    texts = [one.text for block in blocks() if "/tutorials/" in block.page for one in commands(block)]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, text) for text in texts)] == []
