"""`mt generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.commands import need
from mt_core.errors import ConfigError
from mt_core.paths import as_path
from mt_infer.commands.batch import check_files, run_file, write_samples_input
from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, on_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from mt_infer.sampling.parameters import SamplingParameters
    from mt_infer.text import TextGenerator

STANDARD_INPUT = "-"
FILES = "Many prompts"


def generate(
    path: Annotated[
        Path, typer.Argument(parser=as_path, metavar="PATH", help="A run directory, or a checkpoint of any format.")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; - reads standard input. Repeatable.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Default: another each time.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text before which the output ends. Repeatable.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(parser=as_path, metavar="FILE", help="An image for the next <image> of the prompts. Repeatable."),
    ] = None,
    input_: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help='File of prompts: .jsonl, one object with "prompt" a line, or .parquet.',
            rich_help_panel=FILES,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File of completions; goes on where a killed run was.", rich_help_panel=FILES)
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option(min=1, help="So many texts without a prompt, to --output.", rich_help_panel=FILES)
    ] = None,
    set_: SETTINGS = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    nproc: NPROC = None,
) -> None:
    """Continue prompts with a trained model."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt generate")
    from mt_infer.sampling.parameters import SamplingParameters

    sampling = SamplingParameters(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=tuple(stop or ()), max_tokens=max_tokens
    )
    check_files(input_, output, prompt or [], num_samples)
    if output is not None:
        source = input_ or write_samples_input(output, num_samples or 0)
        settings = engine_settings(set_ or [])
        on_ranks(path, settings, device, nproc, lambda generator: run_file(generator, source, output, sampling))
        return
    texts = read_prompts(prompt or [""])
    images = image or []
    on_ranks(
        path, engine_settings(set_ or []), device, nproc, lambda generator: show(generator, texts, images, sampling)
    )


def show(generator: TextGenerator, texts: list[str], images: list[Path], sampling: SamplingParameters) -> None:
    """Prints each prompt with its continuation, as it comes; what an encoder reads, on a line of its own."""
    requests = list(zip(texts, _inputs(generator, texts, images), strict=True))
    for number, (text, inputs) in enumerate(requests):
        typer.echo("\n" * (number > 0) + text, nl=generator.prompts.has_encoder)
        for piece in generator.stream(text, sampling, inputs):
            typer.echo(piece, nl=False)
            sys.stdout.flush()
        typer.echo()


def _inputs(generator: TextGenerator, texts: list[str], images: list[Path]) -> list[dict[str, Tensor]]:
    """What the model takes beside each text. Raises ConfigError for images that it does not take."""
    from mt_infer.prompts import IMAGES, deal_images, read_images

    if not images:
        return [{} for _ in texts]
    if IMAGES not in generator.prompts.conditioned_by:
        family = generator.config.model.family
        raise ConfigError(f"--image: model.family={family} takes no images; a model of model.family=llava does")
    config = generator.config
    dealt = deal_images(texts, images)
    return [{IMAGES: read_images(own, config.model, config.data)} if own else {} for own in dealt]


def read_prompts(prompts: list[str]) -> list[str]:
    """The texts; standard input in place of "-". Raises ConfigError where it is to be read twice."""
    if prompts.count(STANDARD_INPUT) > 1:
        raise ConfigError("--prompt - reads standard input to its end, so that it can be given once")
    return [sys.stdin.read() if prompt == STANDARD_INPUT else prompt for prompt in prompts]
