"""`mt eval classification`, `mt eval ensemble` and `mt eval finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mt_core.commands import host_of, need
from mt_core.errors import ConfigError
from mt_core.paths import as_path, writing
from mt_core.specs import LOSSES
from mt_eval.commands.options import AS_JSON, CHECKPOINT, DEVICE, named_files, seed_option, show
from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, layout_of_ranks, progress_bar, start_ranks

NEEDED = ("torch", "mt-models", "mt-data", "mt-ckpt")
PREDICTIONS = Annotated[
    Path | None, typer.Option(help="Folder for NAME.jsonl of each set: uid, prediction, label, logits, softmax.")
]
RESULTS = Annotated[Path | None, typer.Option(help="Result file (JSON); samples go beside it.", metavar="FILE")]


def classification(
    context: typer.Context,
    path: CHECKPOINT,
    data: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]FILE", help="A file of the task, or a folder of RACE. Repeatable.", show_default=False
        ),
    ],
    task: Annotated[
        str | None, typer.Option(help="mnli, qqp, race, ...: a data.dataset_type. Default: that of the training.")
    ] = None,
    predictions: PREDICTIONS = None,
    output: RESULTS = None,
    as_json: AS_JSON = False,
    set_: SETTINGS = None,
    device: DEVICE = "auto",
    nproc: NPROC = None,
) -> None:
    """Development sets of a finetuned model: accuracy, F1, Matthews or correlation, as the task has it."""
    need(*NEEDED, command="mt eval classification")
    sets = named_files(data)
    # With --nproc this process becomes the launcher and ends here; the ranks run the command again without it.
    start_ranks(context, nproc)

    from mt_core.launch.session import rank_session
    from mt_core.parallel.context import is_writer
    from mt_core.train.build import resolve_device
    from mt_eval.classification.evaluation import evaluate_sets
    from mt_eval.classification.model import TrainedClassifier

    settings = layout_of_ranks(engine_settings(set_ or []))
    with rank_session(resolve_device(device).type):
        classifier = TrainedClassifier(path, host_of(context), task=task, device=device, settings=settings)
        with progress_bar(shown=is_writer()) as bar:
            rows = {name: bar.add_task(name, total=None) for name in sets}
            evaluation = evaluate_sets(
                classifier,
                sets,
                predictions=predictions,
                output=output,
                on_samples=lambda name, count, done: bar.update(rows[name], completed=done, total=count),
            )
        if is_writer():
            show(evaluation, as_json)


def ensemble(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(parser=as_path, metavar="FILE...", help="Predictions for one set.")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Predictions of the ensemble: .jsonl, or .tsv with id and label."),
    ] = None,
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", help="accuracy, f1, matthews, pearson or spearman; repeatable.")
    ] = None,
) -> None:
    """Averages the probabilities that several models gave to the same samples."""
    from mt_eval.classification.predictions import read_ensemble, write_predictions, write_table

    predictions = read_ensemble(files)
    loss = host_of(context)[LOSSES].get("regression" if predictions.is_regression else "classification")
    names = metrics or (["pearson", "spearman"] if predictions.is_regression else ["accuracy"])
    unknown = [name for name in names if name not in loss.metrics]
    if unknown:
        raise ConfigError(f"--metric {unknown[0]}: predictions of {loss.name} have {', '.join(loss.metrics)}")
    if output is not None:
        with writing(output, "--output"):
            (write_table if output.suffix == ".tsv" else write_predictions)(output, predictions)
    typer.echo(f"{len(files)} predictions of {len(predictions.uids):,} samples")
    if not predictions.labelled.any():
        typer.echo("no sample has a label, so that nothing is scored")
        return
    for name in names:
        value = loss.metrics[name].load()(
            predictions.outputs[predictions.labelled], predictions.labels[predictions.labelled]
        )
        typer.echo(f"{name} {value:.4f}")


def finetune(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A file, as of mt train.")] = None,
    seeds: Annotated[list[int] | None, seed_option("Values of train.seed; repeatable.", "--seed")] = None,
    preset: Annotated[str | None, typer.Option(help="Such as mnli-bert-base.")] = None,
    run_dir: Annotated[Path, typer.Option(help="Each run is in seed-N of this folder.")] = Path("runs/finetune"),
    output: Annotated[Path | None, typer.Option(help="Result file (JSON).", metavar="FILE")] = None,
    as_json: AS_JSON = False,
    set_: SETTINGS = None,
    nproc: NPROC = None,
) -> None:
    """Finetunes with several seeds; scores of each run's best epoch, their mean and standard deviation."""
    need(*NEEDED, command="mt eval finetune")
    chosen = seeds or [1234]
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"--seed: {', '.join(map(str, chosen))} has one seed twice; runs with it are the same")
    start_ranks(context, nproc)

    from mt_core.config.loading import LoadedConfig, load_config
    from mt_core.launch.session import rank_session
    from mt_core.parallel.context import is_writer
    from mt_core.train.build import resolve_device
    from mt_eval.classification.evaluation import finetune_seeds, seeds_evaluation

    host = host_of(context)

    def load(seed: int) -> LoadedConfig:
        overrides = [*(set_ or []), f"train.seed={seed}"]
        return load_config(config, preset=preset, overrides=overrides, host=host)

    with rank_session(resolve_device(load(chosen[0]).config.train.device).type):
        runs = finetune_seeds(load, chosen, run_dir, host)
        if not is_writer():
            return
        evaluation = seeds_evaluation(runs, run_dir, load(chosen[0]).config)
        if output is not None:
            evaluation.write(output)
        show(evaluation, as_json)
