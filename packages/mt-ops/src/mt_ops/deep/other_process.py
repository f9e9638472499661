"""A side of a deep comparison that another interpreter computes: another version of mt, or Megatron-Core."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

import mt_ops
from mt_core.errors import ConfigError
from mt_ops.deep.recording import Recording
from mt_ops.deep.tensor_files import ANSWER, BACKWARD, FORWARD, PARAMETERS, REQUEST, TOKENS, load_groups, step_file

LAST_LINES = 12


def recordings_of(
    python: Path, path: Path, tokens: Sequence[Tensor], vocabulary: int, rate: float, module: str = "mt_ops.deep.child"
) -> list[Recording]:
    """Recordings of a model, on tokens [batch, sequence] of each step, between which it takes steps of gradient
    descent.

    Raises ConfigError where the interpreter fails, with the end of what it says, and for another vocabulary.
    """
    request = {"kind": "model", "path": str(path.resolve()), "vocabulary": vocabulary, "rate": rate}
    with _asked(python, request, module, tokens) as (folder, answer):
        if answer["vocabulary"] != vocabulary:
            raise ConfigError(f"A has a vocabulary of {vocabulary}, {path} of {answer['vocabulary']}; they must agree")
        return [_recording(step_file(folder, number)) for number in range(len(tokens))]


def _recording(path: Path) -> Recording:
    groups = load_groups(path)
    return Recording(groups[FORWARD], groups[BACKWARD], groups[PARAMETERS])


def layout_of(
    python: Path, path: Path, beside: Path, steps: int
) -> tuple[dict[str, dict[str, Tensor]], Mapping[str, Any]]:
    """Record of a configuration, made small beside that of A: outputs, gradients and weights by name; losses, and the
    section of the model."""
    request = {"kind": "layout", "path": str(path.resolve()), "beside": str(beside.resolve()), "steps": steps}
    with _asked(python, request, "mt_ops.deep.child", ()) as (folder, answer):
        return load_groups(folder / "run.safetensors"), answer


@contextmanager
def _asked(
    python: Path, request: Mapping[str, Any], module: str, tokens: Sequence[Tensor]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    with TemporaryDirectory(prefix="mt-compare-") as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        if tokens:
            save_file({f"{number:03}": step for number, step in enumerate(tokens)}, folder / TOKENS)
        _run(python, module, folder)
        answer = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
        if "error" in answer:
            raise ConfigError(f"B, computed by {python}: {answer['error']}")
        yield folder, answer


def _run(python: Path, module: str, folder: Path) -> None:
    # This package alone, as the folder that it is in may be that of all packages of this environment.
    packages = folder / "packages"
    packages.mkdir()
    (packages / "mt_ops").symlink_to(Path(mt_ops.__file__).parent, target_is_directory=True)
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(packages), *([before] if before else [])])
    try:
        done = subprocess.run(
            # A path without a folder would be looked for on PATH; not resolved, as a link may be an environment's.
            [str(python.absolute() if python.exists() else python), "-m", module, str(folder)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise ConfigError(
            f"--python-b {python}: {error.strerror or error}; name the python of an environment"
        ) from error
    if done.returncode != 0 or not (folder / ANSWER).exists():
        said = "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
        raise ConfigError(f"B, computed by {python}, failed:\n{said}")
