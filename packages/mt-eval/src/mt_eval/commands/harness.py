"""`mt eval harness`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.commands import need, with_fields
from mt_core.paths import as_path
from mt_eval.commands.options import CHECKPOINT, EvaluationOptions, need_extra, seed_option
from mt_infer.commands.layout import engine_settings, on_ranks, progress_bar

if TYPE_CHECKING:
    from mt_infer.text import TextGenerator


@with_fields
def harness(
    context: typer.Context,
    path: CHECKPOINT,
    run: EvaluationOptions,
    tasks: Annotated[str, typer.Option("--tasks", "-t", metavar="A,B", help="Tasks and groups of lm_eval.")],
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", "-f", min=0, help="Examples before each question.")
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(
            parser=as_path, metavar="DIR", help="A folder with tasks of your own (YAML); its !function files are run."
        ),
    ] = None,
    limit: Annotated[
        float | None, typer.Option(min=0, help="The first documents of each task only; below 1 a share of them.")
    ] = None,
    apply_chat_template: Annotated[bool, typer.Option(help="Questions as messages of a chat.")] = False,
    chat_template: Annotated[
        str | None, typer.Option(metavar="NAME", help="A built-in one or a Jinja file. Default: the tokenizer's.")
    ] = None,
    fewshot_as_multiturn: Annotated[
        bool | None,
        typer.Option(help="Examples as messages of their own. Default: yes, in a chat.", show_default=False),
    ] = None,
    system_instruction: Annotated[str | None, typer.Option(metavar="TEXT", help="Before everything else.")] = None,
    gen_kwargs: Annotated[
        str | None,
        typer.Option(metavar="KEY=VALUE,...", help="How texts are generated, in place of the tasks' values."),
    ] = None,
    log_samples: Annotated[
        bool, typer.Option(help="Documents, requests and answers into the file of samples too.")
    ] = False,
    seed: Annotated[int | None, seed_option("Of examples and of sampled texts. Default: lm_eval's.")] = None,
    add_bos: Annotated[
        bool | None, typer.Option(help="BOS before texts. Default: as the tokenizer does it.", show_default=False)
    ] = None,
    bootstrap_iters: Annotated[int, typer.Option(min=0, help="For standard errors that have no formula.")] = 100_000,
    confirm_run_unsafe_code: Annotated[
        bool, typer.Option("--confirm-run-unsafe-code", help="Run tasks that execute what a model writes.")
    ] = False,
) -> None:
    """Tasks of lm-evaluation-harness, zero-shot or few-shot."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt eval harness")
    need_extra("harness", "lm_eval", command="mt eval harness")

    def use(generator: TextGenerator) -> None:
        from mt_eval.harness.evaluation import HarnessOptions, run_harness

        options = HarnessOptions(
            tasks=tuple(name.strip() for name in tasks.split(",")),
            num_fewshot=num_fewshot,
            include_path=include_path,
            limit=limit,
            apply_chat_template=apply_chat_template,
            chat_template=chat_template,
            fewshot_as_multiturn=fewshot_as_multiturn,
            system_instruction=system_instruction,
            gen_kwargs=gen_kwargs,
            log_samples=log_samples,
            seed=seed,
            add_bos=add_bos,
            bootstrap_iters=bootstrap_iters,
            confirm_run_unsafe_code=confirm_run_unsafe_code,
        )
        rows: dict[str, Any] = {}
        with progress_bar() as bar:

            def on_answer(kind: str, done: int, total: int) -> None:
                if kind not in rows:
                    rows[kind] = bar.add_task(kind, total=total)
                bar.update(rows[kind], completed=done)

            results = run_harness(generator, path, options, output=run.output, on_answer=on_answer)
        show(results, run.as_json)

    on_ranks(context, path, engine_settings(run.set_ or []), run.device, run.nproc, use)


def show(results: dict[str, Any], as_json: bool) -> None:
    """lm_eval's table, or its JSON."""
    from lm_eval.utils import handle_non_serializable, make_table

    if as_json:
        typer.echo(json.dumps(results, indent=2, ensure_ascii=False, default=handle_non_serializable))
        return
    typer.echo(make_table(results))
    if results.get("groups"):
        typer.echo(make_table(results, "groups"))
    for task, count in results["n-truncated"].items():
        if count:
            typer.echo(f"{task}: {count:,} documents were cut to the model's length")
