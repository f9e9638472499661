"""What mt-eval registers."""

from __future__ import annotations

from typing import Any

from mt_core.hookspecs import hookimpl
from mt_core.kinds import Kind, Lazy
from mt_core.specs import CommandSpec, EvaluatorSpec, SectionSpec
from mt_eval.text_scorers import TEXT_SCORERS, TextScorerSpec


@hookimpl
def mt_declare_kinds() -> list[Kind[Any]]:
    return [TEXT_SCORERS]


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="eval",
            doc="Measure a trained model: perplexity, tasks, comparisons",
            app=Lazy("mt_eval.commands.app:app"),
        )
    ]


@hookimpl
def mt_register_evaluators() -> list[EvaluatorSpec]:
    return [
        EvaluatorSpec(
            name="perplexity",
            doc="Perplexity of the texts that eval.perplexity names",
            build=Lazy("mt_eval.perplexity.evaluators:build_evaluator"),
        ),
        EvaluatorSpec(
            name="without_neighbors",
            doc="Loss on validation sets without neighbours, as eval.without_neighbors requests",
            build=Lazy("mt_eval.perplexity.evaluators:build_without_neighbors"),
        ),
    ]


@hookimpl
def mt_register_text_scorers() -> list[TextScorerSpec]:
    return [
        TextScorerSpec(
            name="classifier",
            doc="A classifier finetuned by mt; options checkpoint, attribute, class",
            build=Lazy("mt_eval.detoxification.scorers:build_classifier"),
        ),
        TextScorerSpec(
            name="http",
            doc="A server: POST {texts} -> {scores}; option url",
            build=Lazy("mt_eval.detoxification.scorers:build_http"),
        ),
        TextScorerSpec(
            name="perspective",
            doc="Google's Perspective API, with the key in PERSPECTIVE_API_KEY; options workers, language",
            build=Lazy("mt_eval.detoxification.scorers:build_perspective"),
        ),
    ]


@hookimpl
def mt_register_sections() -> list[SectionSpec]:
    return [
        SectionSpec(
            name="eval",
            doc="Measurements of the model during training, beside the loss on validation sets",
            config_type=Lazy("mt_eval.config:EvalConfig"),
        )
    ]
