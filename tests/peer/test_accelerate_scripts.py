"""Scripts that others wrote for Accelerate run after one changed import, with the losses that Accelerate has.

Some are in Accelerate's own package, of several versions, and in that of pytorch-accelerated, a trainer on top of it,
whose examples are in its wheel. The examples of Accelerate's repository and of transformers' are in no package:
MT_ACCELERATE_SCRIPTS names a folder that is laid out as they are, and their tests skip without it.
`accelerate_process/server.py` says what is put in the place of the hub's models and data.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.peer.accelerate_scripts import CURRENT, Found, Scripts, write_files
from tests.peer.environment import installed_alone

MEGATRON = {
    "ACCELERATE_USE_MEGATRON_LM": "true",
    "MEGATRON_LM_RETURN_LOGITS": "true",
    "MEGATRON_LM_GRADIENT_CLIPPING": "0.0",
}


@dataclass(frozen=True)
class Layout:
    world: int = 1
    variables: Mapping[str, str] | None = None


LAYOUTS = {
    "own modules": Layout(),
    "one process": Layout(variables=MEGATRON),
    "TP 2": Layout(2, {**MEGATRON, "MEGATRON_LM_TP_DEGREE": "2"}),
    "TP 4": Layout(4, {**MEGATRON, "MEGATRON_LM_TP_DEGREE": "4"}),
}
"""Without data-parallel ranks, by whose number scripts multiply their batch."""
DATA_PARALLEL = {
    "own modules": Layout(2),
    "TP 2, DP 2": Layout(4, {**MEGATRON, "MEGATRON_LM_TP_DEGREE": "2"}),
}
"""For scripts whose batch can be halved."""


@dataclass(frozen=True)
class Script:
    """path: in the distribution, or in a repository. version: of Accelerate, whose names the script uses.
    libraries: requirements of distributions on top of Accelerate that the script imports, and of what these need.
    layouts: those that the script itself allows. halved: arguments that are added for half of the batch.
    packages: requirements of the script. plugin: fields of the plugin, as variables. replaced: words of the script that
    only an accelerator can carry out -> others."""

    path: str
    arguments: tuple[str, ...] = ()
    version: str = CURRENT
    distribution: str | None = None
    libraries: tuple[str, ...] = ()
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    text: str = "mrpc"
    halved: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    plugin: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)


PACKAGED = ("--model_name_or_path", "bert-base-cased", "--num_epochs", "1", "--output_dir", ".")
# `DistributedType.TPU`, which their collators compare with, is no name of later versions.
BEFORE_XLA = "accelerate==0.26.1"
BEFORE_5 = ("transformers>=4.50,<4.55",)
"""They have `send_example_telemetry`, and cut an attention mask that is longer than the text."""
TRAINER = "pytorch-accelerated==0.1.61"
LIBRARIES = (TRAINER, "func-to-script", "torchmetrics>=1.3,<1.4", "lightning-utilities")
# Scripts of several years, each with the names of its time.
VERSIONS = {CURRENT: tuple(LAYOUTS), "accelerate==1.0.1": ("own modules",), BEFORE_XLA: ("own modules",)}
SCRIPTS = (
    *(
        Script(f"accelerate/test_utils/scripts/external_deps/{name}.py", PACKAGED, version, version, layouts=layouts)
        for name in ("test_performance", "test_checkpointing")
        for version, layouts in VERSIONS.items()
    ),
    Script(
        "accelerate/test_utils/scripts/external_deps/test_peak_memory_usage.py",
        ("--num_epochs", "2", "--n_train", "48", "--n_val", "16"),
        distribution=CURRENT,
        # It reads the counters of an accelerator's memory, and none of them without one.
        replaced={"gc.collect()": "gc.collect(); self.begin = self.end = self.peak = 0"},
    ),
    Script(
        "examples/nlp/hf_bert_glue_mrpc.py",
        ("--num_epochs", "1"),
        distribution=TRAINER,
        libraries=LIBRARIES,
        text="evaluated",  # on four ranks it requires four batches of 32
        halved=("--batch_size", "8"),
    ),
    *(
        Script(f"examples/core/{name}.py", distribution=TRAINER, libraries=LIBRARIES, layouts=("own modules",))
        for name in (
            *("train_mnist", "train_with_metrics_in_loop", "train_with_metrics_in_callback"),
            "custom_callback_event",
        )
    ),
    *(
        Script(
            f"examples/vision/transfer_learning/{name}.py",
            ("--data_dir", "pictures"),
            distribution=TRAINER,
            libraries=LIBRARIES,
            layouts=("own modules",),
        )
        for name in ("pytorch_tutorial_finetune", "progressive_resizing")
    ),
    Script("examples/nlp_example.py", (), BEFORE_XLA),
    Script("examples/complete_nlp_example.py", ("--checkpointing_steps", "epoch"), BEFORE_XLA),
    Script(
        "examples/by_feature/automatic_gradient_accumulation.py",
        ("--observed_batch_size", "16"),
        halved=("--observed_batch_size", "8"),
    ),
    Script("examples/by_feature/checkpointing.py", ("--checkpointing_steps", "3"), BEFORE_XLA),
    # Folds of whole batches, of two times 16 samples.
    Script("examples/by_feature/cross_validation.py", ("--num_folds", "2"), BEFORE_XLA, packages=("scikit-learn",)),
    Script("examples/by_feature/ddp_comm_hook.py"),
    Script("examples/by_feature/early_stopping.py", (), BEFORE_XLA),
    Script("examples/by_feature/gradient_accumulation.py", ("--gradient_accumulation_steps", "3"), BEFORE_XLA),
    # It sums batches itself, and clips to 1, which is then the plugin's.
    Script(
        "examples/by_feature/gradient_accumulation_for_autoregressive_models.py",
        ("--gradient_accumulation_steps", "3", "--per_device_batch_size", "20"),
        plugin={"MEGATRON_LM_GRADIENT_CLIPPING": "1.0"},
        text="lines",
        halved=("--per_device_batch_size", "10"),
        packages=BEFORE_5,
    ),
    # It refuses Megatron-LM itself.
    Script("examples/by_feature/local_sgd.py", ("--local_sgd_steps", "2"), BEFORE_XLA, layouts=("own modules",)),
    Script(
        "examples/by_feature/megatron_lm_gpt_pretraining.py",
        (
            *("--model_name_or_path", "gpt2", "--train_file", "train.txt", "--validation_file", "valid.txt"),
            *("--block_size", "16", "--per_device_train_batch_size", "8", "--num_train_epochs", "2", "--seed", "1"),
            *("--learning_rate", "1e-3", "--weight_decay", "0.1", "--output_dir", "out"),
        ),
        halved=("--per_device_train_batch_size", "4"),
        packages=BEFORE_5,
    ),
    Script("examples/by_feature/memory.py", (), BEFORE_XLA),
    Script("examples/by_feature/multi_process_metrics.py", (), BEFORE_XLA),
    Script("examples/by_feature/profiler.py", ("--cpu",)),
    Script("examples/by_feature/tracking.py", ("--with_tracking",), BEFORE_XLA),
    Script(
        "examples/pytorch/text-classification/run_glue_no_trainer.py",
        (
            *(
                "--model_name_or_path",
                "bert-base-cased",
                "--train_file",
                "train.json",
                "--validation_file",
                "valid.json",
            ),
            *("--learning_rate", "1e-3", "--weight_decay", "0.1", "--num_train_epochs", "1", "--seed", "1"),
        ),
        packages=BEFORE_5,
    ),
)
WHOLE_BATCHES = tuple(script for script in SCRIPTS if script.path.startswith(("examples/core/", "examples/vision/")))
"""Scripts with a batch of their own on each rank, so that ranks train on more than one process does."""
BATCH = "per_device_batch_size"
SCHEDULE = {"create_scheduler_fn=lr_scheduler,": ""}
"""Accelerate counts a step of a schedule for each rank: the rates of OneCycleLR then differ by a thousandth."""
COMPARED = 30
"""Losses: over hundreds of steps the order of summation grows to more than is compared."""
CHECKED_BY_THEMSELVES = ("test_sync", "external_deps/test_metrics")
"""Scripts of the package that compare what they compute."""


def located(script: Script) -> Path:
    """Skips the test where the script is not there."""
    if script.distribution is not None:
        return installed_alone(script.distribution) / script.path
    folder = os.environ.get("MT_ACCELERATE_SCRIPTS")
    path = Path(folder or ".") / script.path
    if folder is None or not path.is_file():
        pytest.skip(f"MT_ACCELERATE_SCRIPTS={folder}: no {script.path} is there")
    return path


def named(script: Script) -> str:
    is_older = script.distribution not in (None, CURRENT, TRAINER)
    return Path(script.path).stem + (f" of {script.distribution}" if is_older else "")


Started = Callable[..., Scripts]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """(requirements) -> the process that has them."""
    files = write_files(tmp_path_factory.mktemp("files"))
    processes: dict[tuple[str, ...], Scripts] = {}

    def with_packages(*packages: str) -> Scripts:
        if packages not in processes:
            processes[packages] = Scripts(files, *packages)
        return processes[packages]

    yield with_packages
    for process in processes.values():
        process.close()


def run(
    started: Started,
    script: Script,
    layout: Layout,
    folder: Path,
    *more: str,
    package: str = "mt_accelerate",
    replaced: Mapping[str, str] | None = None,
) -> Found:
    path = located(script)
    return started(*script.packages).run(
        package,
        path,
        folder,
        (*script.arguments, *more),
        world=layout.world,
        variables=layout.variables and {**layout.variables, **script.plugin},
        version=script.version,
        text=script.text,
        libraries=script.libraries,
        replaced={**script.replaced, **(replaced or {})},
    )


@pytest.fixture(scope="module", params=SCRIPTS, ids=named)
def reference(request, started: Started, tmp_path_factory: pytest.TempPathFactory) -> tuple[Script, Found]:
    """What Accelerate computes on one process."""
    folder = tmp_path_factory.mktemp("theirs") / "run"
    found = run(started, request.param, Layout(), folder, package="accelerate")
    assert len(found.losses) > 3
    return request.param, found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_script_has_accelerates_losses(reference, started: Started, name: str, tmp_path: Path) -> None:
    script, theirs = reference
    if name not in script.layouts:
        pytest.skip(f"{script.path} allows {', '.join(script.layouts)}")
    ours = run(started, script, LAYOUTS[name], tmp_path / "run")
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.metrics == theirs.metrics


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_data_parallel_ranks_share_the_batch(reference, started: Started, name: str, tmp_path: Path) -> None:
    script, theirs = reference
    if not script.halved:
        pytest.skip(f"{script.path} has a batch of its own")
    if name != "own modules" and "one process" not in script.layouts:
        pytest.skip(f"{script.path} allows {', '.join(script.layouts)}")
    ours = run(started, script, DATA_PARALLEL[name], tmp_path / "run", *script.halved)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.metrics == theirs.metrics


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("script", WHOLE_BATCHES, ids=named)
def test_ranks_train_on_the_batches_of_a_larger_one(
    script: Script, started: Started, world: int, tmp_path: Path
) -> None:
    """What Accelerate computes on one process with the batch of all ranks."""
    larger = {f"{BATCH}={size},": f"{BATCH}={world * size}," for size in (64, 32, 4)}
    theirs = run(started, script, Layout(), tmp_path / "theirs", package="accelerate", replaced={**larger, **SCHEDULE})
    ours = run(started, script, Layout(world), tmp_path / "ours", replaced=SCHEDULE)
    assert len(ours.losses) == len(theirs.losses) > COMPARED
    assert ours.losses[:COMPARED] == pytest.approx(theirs.losses[:COMPARED], rel=1e-5)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", CHECKED_BY_THEMSELVES)
def test_a_script_that_checks_itself_passes(started: Started, name: str, world: int, tmp_path: Path) -> None:
    path = installed_alone(CURRENT) / "accelerate" / "test_utils" / "scripts" / f"{name}.py"
    started().run("mt_accelerate", path, tmp_path / "run", world=world)


def test_every_name_works_or_is_refused_with_a_reason(monkeypatch) -> None:
    """Of accelerate, accelerate.utils, Accelerator, one that was made, and its state."""
    monkeypatch.syspath_prepend(str(installed_alone(CURRENT)))
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
    names = public_names(accelerate.Accelerator)
    theirs, ours = accelerate.Accelerator(cpu=True), mt_accelerate.Accelerator(cpu=True)
    try:
        names |= public_names(theirs)
        states = public_names(theirs.state) - public_names(ours.state)
    finally:
        theirs.state._reset_state(reset_partial_state=True)
    assert {name for name in names if not hasattr(ours, name)} == set(ATTRIBUTES)
    assert states == {"get_deepspeed_plugin", "select_deepspeed_plugin"}


def public_names(value: object) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}
