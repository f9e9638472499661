"""A model with a tower whose configuration is refused is not read as its decoder alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.ckpt.family_cases import CASES, make_model

from mt_ckpt.hugging_face.reader import open_checkpoint
from mt_core.errors import ConfigError

FIELDS = {
    "kimi_k25": ("vision_config", "hidden_act", "mish"),
    "qwen3_5": ("vision_config", "hidden_act", "mish"),
    "minimax_m3_vl": ("vision_config", "hidden_act", "mish"),
}
"""Case of a model_type that a family of decoders reads too -> a field of its tower with a value that is refused."""


@pytest.mark.parametrize("architectures", [None, ["WrittenByAnotherProgram"]])
@pytest.mark.parametrize("name", FIELDS)
def test_a_refused_tower_is_not_left_out(host, tmp_path: Path, name: str, architectures: list[str] | None) -> None:
    """transformers writes Kimi's class with another name than published files, and other programs may write none."""
    make_model(CASES[name]).save_pretrained(tmp_path)
    file, (part, key, value) = tmp_path / "config.json", FIELDS[name]
    config = json.loads(file.read_text())
    config["architectures"] = architectures
    file.write_text(json.dumps(config))
    assert open_checkpoint(tmp_path, host) is not None
    config[part][key] = value
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=key):
        open_checkpoint(tmp_path, host)
