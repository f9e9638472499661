"""docs/guides/plugins.md: the plugin that the page writes registers its loss, is found, and trains."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tests.docs.blocks import ROOT, Block, blocks, write_package

from mt_cli import main
from mt_core.plugins import Plugin, load_plugins

PAGE = "docs/guides/plugins.md"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page in a folder that Python imports from."""
    write_package(PAGE, "my_losses", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("my_losses")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def page_blocks(language: str) -> list[Block]:
    return [block for block in blocks() if block.page == PAGE and block.language == language]


def test_the_loss_of_the_page_trains(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = load_plugins()
    import my_losses.plugin  # type: ignore[import-not-found]

    host.add(my_losses.plugin, Plugin("my-losses", "my_losses.plugin", "my-losses", "1.0.0"))
    monkeypatch.setattr("mt_cli.commands.train.load_plugins", lambda: host)
    monkeypatch.setattr(main, "load_plugins", lambda **_: host)
    command = next(line for block in page_blocks("") for line in block.text.splitlines() if "loss=focal" in line)
    small = ["model.num_layers=1", "model.hidden_size=16", "train.train_iters=2", "train.sample_prompt=null"]
    quick = [*small, "data.corpus_bytes=1000000", "train.eval_iters=1", "lr_schedule.lr_warmup_iters=1"]
    assert main.run([*command.split()[1:], *(part for text in quick for part in ("--set", text))]) == 0
    assert (package / "runs" / "gpt-tiny" / "checkpoints" / "latest").exists()


def test_the_snippet_on_testing_runs(package: Path) -> None:
    (block,) = [block for block in page_blocks("python") if "import my_losses.plugin" in block.text]
    exec(compile(block.text, block.place, "exec"), {})


def test_every_hook_is_in_the_table() -> None:
    from mt_core import hookspecs

    text = (ROOT / PAGE).read_text()
    assert [name for name in vars(hookspecs) if name.startswith("mt_") and f"`{name}(" not in text] == []
