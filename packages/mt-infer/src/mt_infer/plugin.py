"""What mt-infer registers."""

from __future__ import annotations

from typing import Any

from mt_core.hookspecs import hookimpl
from mt_core.kinds import Kind, Lazy
from mt_core.specs import CommandSpec, RunRequestSpec, SectionSpec
from mt_infer.adapters import ADAPTER_SETS
from mt_infer.chat.tool_calls.form import TOOL_CALL_FORMS, ToolCallFormSpec
from mt_infer.chat.tool_calls.specs import FORMS
from mt_infer.pair_scorers import PAIR_SCORERS


@hookimpl
def mt_declare_kinds() -> list[Kind[Any]]:
    return [ADAPTER_SETS, PAIR_SCORERS, TOOL_CALL_FORMS]


@hookimpl
def mt_register_tool_call_forms() -> list[ToolCallFormSpec]:
    return FORMS


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="bench generate",
            doc="Measure generation under a load of requests",
            app=Lazy("mt_infer.commands.measure:bench_generate"),
        ),
        CommandSpec(
            name="verify generation",
            doc="Check that generation has the tokens and probabilities of training, however it is computed",
            app=Lazy("mt_infer.commands.measure:verify_generation"),
        ),
        CommandSpec(
            name="quantization",
            doc="Show how weights are stored, and what quantized weights and a quantized cache cost",
            app=Lazy("mt_infer.commands.measure:quantization"),
        ),
        CommandSpec(
            name="generate",
            doc="Continue prompts with a trained model",
            app=Lazy("mt_infer.commands.generate:generate"),
        ),
        CommandSpec(
            name="serve",
            doc="Serve models over HTTP, as OpenAI and Megatron do",
            app=Lazy("mt_infer.commands.serve:serve"),
        ),
        CommandSpec(
            name="chat",
            doc="Talk to a model in the terminal",
            app=Lazy("mt_infer.commands.chat:chat"),
        ),
    ]


@hookimpl
def mt_register_run_requests() -> list[RunRequestSpec]:
    return [
        RunRequestSpec(
            name="generate",
            doc="Continues a text with the weights of this step",
            answer=Lazy("mt_infer.run_request:answer_generate"),
        )
    ]


@hookimpl
def mt_register_sections() -> list[SectionSpec]:
    return [
        SectionSpec(
            name="inference",
            doc="Generating and scoring with a trained model",
            config_type=Lazy("mt_infer.config:InferenceConfig"),
        )
    ]
