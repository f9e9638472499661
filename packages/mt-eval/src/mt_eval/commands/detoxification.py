"""`mt eval toxicity` and `mt eval detoxify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.commands import host_of, need
from mt_core.paths import as_path
from mt_eval.commands.options import AS_JSON, CHECKPOINT, named_options, seed_option
from mt_infer.commands.layout import NPROC, SETTINGS, progress_bar

if TYPE_CHECKING:
    from mt_eval.text_scorers import TextScorer

SCORER = Annotated[str, typer.Option(help="Judge of texts: http, perspective, classifier, or one of a plugin.")]
SCORER_OPTION = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the scorer. Repeatable.")]
ATTRIBUTE = Annotated[str, typer.Option(help="Which of the scorer's attributes counts.")]


def toxicity(
    context: typer.Context,
    completions: Annotated[
        Path, typer.Argument(parser=as_path, metavar="FILE", help="Of mt generate --output; several texts a prompt.")
    ],
    scorer: SCORER,
    scorer_option: SCORER_OPTION = None,
    attribute: ATTRIBUTE = "toxicity",
    output: Annotated[
        Path | None,
        typer.Option(parser=as_path, help="FILE with the scores of each text. Default: beside it, .scored.jsonl."),
    ] = None,
    as_json: AS_JSON = False,
) -> None:
    """Expected maximum toxicity and toxicity probability of generated texts."""
    need("torch", "mt-infer", command="mt eval toxicity")
    from mt_eval.detoxification.annotation import annotate, read_lines, toxicity_metrics
    from mt_infer.batch_files import count_lines

    judge = build_scorer(context, scorer, scorer_option or [])
    target = output or completions.with_suffix(".scored.jsonl")
    described = {"name": scorer, "options": scorer_options(scorer_option or [])}
    with progress_bar() as bar:
        row = bar.add_task("scores", total=count_lines(completions))
        annotate(completions, target, judge, described, on_line=lambda done: bar.update(row, completed=done))
    show(toxicity_metrics(read_lines(target), attribute), as_json)


def detoxify(
    context: typer.Context,
    path: CHECKPOINT,
    folder: Annotated[Path, typer.Option(parser=as_path, help="Working folder; the same command goes on in it.")],
    num_samples: Annotated[int, typer.Option(min=1, help="Texts that the model samples without a prompt.")],
    scorer: SCORER,
    scorer_option: SCORER_OPTION = None,
    prompts: Annotated[
        Path | None,
        typer.Option(parser=as_path, help='JSON lines with "prompt", to measure toxicity before and after.'),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]FILE", help="Texts, to measure perplexity before and after. Repeatable."),
    ] = None,
    share: Annotated[float, typer.Option(min=0, max=1, help="Of the samples: the least toxic ones.")] = 0.5,
    attribute: ATTRIBUTE = "toxicity",
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a sample.")] = 1000,
    top_p: Annotated[float, typer.Option(help="Of sampling.")] = 0.9,
    seed: Annotated[int, seed_option("Of sampling, and of the order of training texts.")] = 1234,
    continuations: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 25,
    continuation_tokens: Annotated[int, typer.Option(min=1, help="Of a continuation.")] = 20,
    train: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION.KEY=VALUE", help="Setting of the finetuning. Repeatable."),
    ] = None,
    set_: SETTINGS = None,
    nproc: NPROC = None,
    as_json: AS_JSON = False,
) -> None:
    """Sample, score, finetune on the least toxic texts, and measure before and after."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", "mt-infer", command="mt eval detoxify")
    from mt_eval.detoxification.loop import Detoxification, Plan

    plan = Plan(
        checkpoint=str(path),
        num_samples=num_samples,
        prompts=None if prompts is None else str(prompts),
        texts=tuple(data or ()),
        share=share,
        attribute=attribute,
        max_tokens=max_tokens,
        top_p=top_p,
        seed=seed,
        continuations=continuations,
        continuation_tokens=continuation_tokens,
        train=tuple(train or ()),
        engine=tuple(set_ or ()),
        nproc=nproc,
        scorer=scorer,
        scorer_options=scorer_options(scorer_option or []),
    )
    judge = build_scorer(context, scorer, scorer_option or [])
    report = Detoxification(plan, folder, judge, on_step=lambda text: typer.echo(text, err=True)).run()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for when, metrics in report.items():
        typer.echo(f"{when}:")
        show(metrics, as_json=False)


def build_scorer(context: typer.Context, name: str, options: list[str]) -> TextScorer:
    """Raises ConfigError for one that no plugin registers."""
    host = host_of(context)
    built: TextScorer = (
        host.registry("text_scorers").get(name, key="--scorer").build.load()(scorer_options(options), host)
    )
    return built


def scorer_options(options: list[str]) -> dict[str, str]:
    return named_options(options, "--scorer-option")


def show(metrics: dict[str, float], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(metrics, indent=2))
        return
    for name, value in metrics.items():
        typer.echo(f"  {name:40} {value:.4f}")
