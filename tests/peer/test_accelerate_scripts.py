"""Scripts that Accelerate's own wheel carries run after one changed import, with the losses that Accelerate has."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.peer.accelerate_process.tiny_model import write_classifier
from tests.peer.environment import installed_alone, python_beside_this

RUN = Path(__file__).parent / "accelerate_process" / "run_script.py"
TRAINING = ("test_performance", "test_checkpointing")
"""Scripts of `external_deps` that train a classifier of pairs of sentences."""
PLAIN = ("test_sync",)
"""Scripts that compare what they compute themselves."""
MEGATRON = {
    "ACCELERATE_USE_MEGATRON_LM": "true",
    "MEGATRON_LM_RETURN_LOGITS": "true",
    "MEGATRON_LM_GRADIENT_CLIPPING": "0.0",
}
LAYOUTS: dict[str, tuple[int, dict[str, str]]] = {
    "own modules": (1, {}),
    "one process": (1, MEGATRON),
    "TP 2": (2, {**MEGATRON, "MEGATRON_LM_TP_DEGREE": "2"}),
}


def run(package: str, script: Path, folder: Path, world: int, variables: dict[str, str], *own: str) -> list[float]:
    accelerate = installed_alone("accelerate>=1.15")
    python = str(python_beside_this("datasets", "evaluate"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    found = folder / "losses"
    folder.mkdir(parents=True)
    done = subprocess.run(
        [python, *launcher, str(RUN), package, str(script), str(found), *own],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(accelerate),
            "ACCELERATE_USE_CPU": "true",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "hub"),
            **variables,
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(Path(f"{found}.0").read_text(encoding="utf-8")))


def scripts() -> Path:
    return installed_alone("accelerate>=1.15") / "accelerate" / "test_utils" / "scripts"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "bert"
    write_classifier(folder)
    return folder


@pytest.fixture(scope="module", params=TRAINING)
def reference(
    request, classifier: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str], list[float]]:
    script = scripts() / "external_deps" / f"{request.param}.py"
    own = ["--model_name_or_path", str(classifier), "--num_epochs", "1", "--output_dir", "."]
    return script, own, run("accelerate", script, tmp_path_factory.mktemp("theirs") / "run", 1, {}, *own)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_script_has_accelerates_losses(reference, layout: str, tmp_path: Path) -> None:
    script, own, losses = reference
    world, variables = LAYOUTS[layout]
    found = run("mt_accelerate", script, tmp_path / "run", world, variables, *own)
    assert len(found) == len(losses) > 3
    assert found == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("script", PLAIN)
def test_a_script_that_checks_itself_passes(script: str, world: int, tmp_path: Path) -> None:
    run("mt_accelerate", scripts() / f"{script}.py", tmp_path / "run", world, {})


def test_every_name_works_or_is_refused_with_a_reason(monkeypatch) -> None:
    """Of accelerate, accelerate.utils and Accelerator."""
    monkeypatch.syspath_prepend(str(installed_alone("accelerate>=1.15")))
    import accelerate
    import accelerate.utils

    import mt_accelerate
    import mt_accelerate.utils
    from mt_accelerate.refused_names import ATTRIBUTES, RefusedNameError

    for theirs, ours in ((accelerate, mt_accelerate), (accelerate.utils, mt_accelerate.utils)):
        for name in (name for name in dir(theirs) if not name.startswith("_")):
            # Any other error than the refusal, which has the reason, fails the test.
            with contextlib.suppress(RefusedNameError):
                getattr(ours, name)
    names = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    assert {name for name in names if not hasattr(mt_accelerate.Accelerator, name)} == set(ATTRIBUTES)
