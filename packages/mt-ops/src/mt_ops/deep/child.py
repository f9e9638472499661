"""One side of `mt compare --deep`, computed by another interpreter: that of an environment with another version of mt.

The folder that the child gets holds request.json and, for a model, tokens.safetensors. It writes a recording of each
step, or run.safetensors of a layout, and answer.json. Its mt is that of its environment; mt_ops is this one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from mt_core.errors import MtError
from mt_ops.deep.recording import Recording, record, update
from mt_ops.deep.tensor_files import (
    ANSWER,
    BACKWARD,
    FORWARD,
    PARAMETERS,
    REQUEST,
    TOKENS,
    save_groups,
    step_file,
)


def compute(folder: Path) -> None:
    """What the request asks for. An MtError becomes the answer."""
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    try:
        answer = _model(folder, request) if request["kind"] == "model" else _layout(folder, request)
    except MtError as error:
        answer = {"error": str(error)}
    (folder / ANSWER).write_text(json.dumps(answer), encoding="utf-8")


def _model(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    from mt_core.plugins import load_plugins
    from mt_ops.deep.models import open_model

    model, vocabulary = open_model(Path(request["path"]), load_plugins())
    if vocabulary != request["vocabulary"]:
        return {"vocabulary": vocabulary}
    for number, tokens in sorted(load_file(folder / TOKENS).items()):
        _save(record(model, tokens), step_file(folder, int(number)))
        update(model.model, request["rate"])
    return {"vocabulary": vocabulary}


def _layout(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    from mt_core.plugins import load_plugins
    from mt_ops.deep.layouts import record_layout, small_configuration

    config = small_configuration(Path(request["path"]), Path(request["beside"]), load_plugins(), request["steps"])
    (recorded,) = record_layout(config, request["steps"], 0)
    groups = {"outputs": recorded.outputs, "gradients": recorded.run.gradients, "weights": recorded.run.weights}
    save_groups(groups, folder / "run.safetensors")
    return {"losses": recorded.run.losses, "model": config.model.model_dump(mode="json")}


def _save(recording: Recording, path: Path) -> None:
    groups = {FORWARD: recording.forward, BACKWARD: recording.backward, PARAMETERS: recording.parameters}
    save_groups(groups, path)


if __name__ == "__main__":
    compute(Path(sys.argv[1]))
