"""What mt-ops registers."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.specs import CallbackSpec, CommandSpec, SectionSpec


def _command(name: str, doc: str) -> CommandSpec:
    return CommandSpec(name=name, doc=doc, app=Lazy(f"mt_ops.commands.{name}:{name}"))


def _tracker(name: str, doc: str) -> CallbackSpec:
    module = "mt_ops.trackers.services"
    return CallbackSpec(name=name, doc=doc, build=Lazy(f"{module}:build_{name}"))


@hookimpl
def mt_register_callbacks() -> list[CallbackSpec]:
    return [
        CallbackSpec(
            name="memory_plan",
            doc="Records the memory that mt plan expects of each rank, which mt report shows beside the measured",
            build=Lazy("mt_ops.memory_plan:build_memory_plan"),
        ),
        _tracker("tensorboard", "Metrics in TensorBoard's event files"),
        _tracker("wandb", "Metrics in Weights & Biases"),
        _tracker("mlflow", "Metrics in MLflow"),
        _tracker("trackio", "Metrics in trackio"),
        _tracker("comet", "Metrics in Comet"),
    ]


def _section(tracker: str, type_: str, doc: str) -> SectionSpec:
    return SectionSpec(name=tracker, doc=doc, config_type=Lazy(f"mt_ops.trackers.config:{type_}"))


@hookimpl
def mt_register_sections() -> list[SectionSpec]:
    return [
        _section("tensorboard", "TensorBoardConfig", "Event files of TensorBoard"),
        _section("wandb", "WandbConfig", "A run of Weights & Biases"),
        _section("mlflow", "MlflowConfig", "A run of MLflow"),
        _section("trackio", "TrackioConfig", "A run of trackio"),
        _section("comet", "CometConfig", "An experiment of Comet"),
    ]


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        _command("compare", "Name the first step and quantity in which two runs part, and what explains it"),
        _command("ctl", "Ask a running training to save, evaluate, generate, stop or change a value"),
        _command("plot", "Draw a metric of runs as SVG, PNG or PDF, or in the terminal"),
        _command("report", "Write a page about runs that opens from disk: curves, differences, time, events"),
        _command("watch", "Show a run that is going: curves, time left, ranks, memory, events"),
    ]
