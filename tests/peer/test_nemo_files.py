"""Configurations of NeMo 1.x for pretraining: they import, and what imports trains when made small.

They are in no package: wheels of NeMo have the code alone. MT_NEMO_FILES names folders with them, separated by colons,
such as `examples/nlp/language_modeling/conf` of its repository.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.peer.test_megatron_scripts import GOAL, imported, train_small
from tests.peer.test_torchtitan_files import with_data

from mt_core.plugins import PluginHost

OTHERS = ("_inference", "_config_tuning", "_finetuning", "_peft", "_retro", "_t5", "_bart", "_validate", "_gpt_dpo")
"""Parts of names of files that pretrain no decoder or BERT."""


def files() -> list[Path]:
    folders = [Path(folder) for folder in os.environ.get("MT_NEMO_FILES", "").split(":") if folder]
    found = [path for folder in folders for path in sorted(folder.glob("megatron_*config.yaml"))]
    return [path for path in found if not any(part in path.stem for part in OTHERS)]


def test_configurations_import_and_train(host: PluginHost, tmp_path: Path) -> None:
    if not files():
        pytest.skip("MT_NEMO_FILES names no folder with NeMo's configurations, which its package does not have")
    failed: dict[str, str] = {}
    seen = set[str]()
    for path in files():
        result, why = imported(path, host)
        if result is None:
            failed[path.stem] = why
        elif result.sections["model"]["family"] != "bert":
            with_data(result.sections)
            train_small(result, host, seen, tmp_path)
    assert len(files()) > 4
    assert len(seen) > 2
    assert 1 - len(failed) / len(files()) >= GOAL, failed
