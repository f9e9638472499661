"""What mt-tools registers."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.specs import CallbackSpec, CommandSpec, RunRequestSpec, SectionSpec


def _command(name: str, attribute: str, doc: str) -> CommandSpec:
    return CommandSpec(name=name, doc=doc, app=Lazy(f"mt_tools.commands.{name}:{attribute}"))


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        _command("verify", "app", "Check that a layout, or a resumed run, computes the same"),
        _command("plan", "plan", "Report what each rank of a layout holds and sends; find layouts that fit"),
        _command(
            "estimate", "estimate", "Estimate the memory of a model by dtype, as Accelerate does, and of a layout"
        ),
        _command("calibrate", "calibrate", "Quantize a model by what it computes of a data set"),
        _command("bench", "app", "Measure speed and memory; compare and plot measurements"),
        _command("profile", "profile", "Record training steps: where their time goes, and which key would change it"),
    ]


@hookimpl
def mt_register_callbacks() -> list[CallbackSpec]:
    return [
        CallbackSpec(
            name="profile",
            doc="Records the steps of [profile] by torch's profiler",
            build=Lazy("mt_tools.profile.recording:build_profile"),
            all_ranks=True,
        )
    ]


@hookimpl
def mt_register_run_requests() -> list[RunRequestSpec]:
    return [
        RunRequestSpec(
            name="profile",
            doc="Records the next N steps",
            answer=Lazy("mt_tools.profile.recording:answer_profile"),
        )
    ]


@hookimpl
def mt_register_sections() -> list[SectionSpec]:
    return [
        SectionSpec(
            name="profile",
            doc="Steps that are recorded by torch's profiler",
            config_type=Lazy("mt_tools.profile.config:ProfileConfig"),
        )
    ]
