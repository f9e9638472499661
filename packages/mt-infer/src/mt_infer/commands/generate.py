"""`mt generate`: prompts from the command line, files of prompts, and unconditional samples."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import TextColumn

from mt_core.commands import need, with_fields
from mt_core.errors import ConfigError
from mt_core.paths import as_path, writing
from mt_core.wording import counted
from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, on_ranks, progress_bar
from mt_infer.commands.sampling import SamplingOptions

if TYPE_CHECKING:
    from torch import Tensor

    from mt_infer.batch_files import Progress
    from mt_infer.prompts import Prompt
    from mt_infer.sampling.parameters import SamplingParameters
    from mt_infer.text import Completion, TextGenerator


def check_files(source: Path | None, target: Path | None, prompts: list[str], num_samples: int | None) -> None:
    """Raises ConfigError for options that do not go together, before a model is loaded."""
    if source is None and num_samples is None:
        if target is not None:
            raise ConfigError("--output takes the completions of --input or --num-samples; give one of them")
        return
    if target is None:
        raise ConfigError(f"{'--input' if source else '--num-samples'} needs --output, the file of completions")
    if prompts or (source is not None and num_samples is not None):
        raise ConfigError("prompts come from one place: give --prompt, --input or --num-samples")
    if source is not None and not source.exists():
        raise ConfigError(f"--input {source}: no such file")
    if not target.parent.exists():
        raise ConfigError(f"--output {target}: there is no folder {target.parent}")


def write_samples_input(target: Path, count: int) -> Path:
    """A file of `count` empty prompts beside the output, which start a document each."""
    source = target.with_name(target.name + ".prompts.jsonl")
    with writing(source, "--output"):
        source.write_text((json.dumps({"prompt": ""}) + "\n") * count, encoding="utf-8")
    return source


def run_file(generator: TextGenerator, source: Path, target: Path, sampling: SamplingParameters) -> None:
    """With progress on standard error, and a summary."""
    from mt_infer.batch_files import count_lines, generate_file

    console = Console(stderr=True)
    started = time.monotonic()
    with progress_bar(TextColumn("{task.fields[rate]}")) as bar:
        task = bar.add_task("lines", total=count_lines(source), rate="")

        def show(progress: Progress) -> None:
            rate = progress.tokens / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=progress.lines, rate=f"{rate:,.0f} tokens/s")

        done = generate_file(generator, source, target, sampling, show)
    seconds = time.monotonic() - started
    failed = f"; {done.failed} could not be served (their lines have an error)" if done.failed else ""
    console.print(
        f"{target}: {counted(done.lines, 'line')}, {counted(done.tokens, 'token')} in {seconds:.1f} s{failed}",
        soft_wrap=True,
    )


class Request(NamedTuple):
    """text: as given, which is shown. prompt, inputs: what the model takes."""

    text: str
    prompt: Prompt
    inputs: Mapping[str, Tensor]


STANDARD_INPUT = "-"
FILES = "Many prompts"


@with_fields
def generate(
    context: typer.Context,
    path: Annotated[
        Path, typer.Argument(parser=as_path, metavar="PATH", help="A run directory, or a checkpoint of any format.")
    ],
    *,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; - reads standard input. Repeatable.", show_default=False)
    ] = None,
    sampling: SamplingOptions,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            parser=as_path,
            metavar="FILE",
            help="An image for the next <image> of the prompts, or a video (a file or a folder of frames). Repeatable.",
        ),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(
            parser=as_path,
            metavar="FILE",
            help="A sound (a WAV file) for the next <audio> of the prompts. Repeatable.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A line of JSON for each sequence: text, tokens, log-probabilities.")
    ] = False,
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
    parameters = sampling.parameters()
    if not (as_json or output) and (parameters.logprobs is not None or parameters.prompt_logprobs is not None):
        raise ConfigError("log-probabilities are shown with --json; add it, or leave out --logprobs, --prompt-logprobs")
    check_files(input_, output, prompt or [], num_samples)
    if output is not None and (image or audio):
        raise ConfigError("--image and --audio are for --prompt; prompts of --input and --num-samples have none")
    if output is None:
        texts = read_prompts(prompt or [""])
    else:
        source = input_ or write_samples_input(output, num_samples or 0)

    def use(generator: TextGenerator) -> None:
        requested = sampling.with_tokens(parameters, generator.tokenizer)
        if output is not None:
            run_file(generator, source, output, requested)
            return
        requests = _requests(generator, texts, image or [], audio or [])
        (show_json if as_json else show)(generator, requests, requested)

    on_ranks(context, path, engine_settings(set_ or []), device, nproc, use)


def show(generator: TextGenerator, requests: list[Request], sampling: SamplingParameters) -> None:
    """Prints each prompt with its continuation, as it comes; or with each of several, once they are known. What an
    encoder reads is on a line of its own."""
    several = sampling.num_beams > 1 or sampling.sequences > 1
    for number, (text, prompt, inputs) in enumerate(requests):
        typer.echo("\n" * (number > 0), nl=False)
        if several:
            before = text + "\n" * generator.prompts.has_encoder
            completions = generator.generate([prompt], sampling, [inputs])[0]
            typer.echo("\n\n".join(before + done.require_complete().text for done in completions))
            continue
        pieces = generator.stream(prompt, sampling, inputs)
        first = next(pieces, "")  # a prompt is not shown in front of an error
        typer.echo(text, nl=generator.prompts.has_encoder)
        for piece in chain((first,), pieces):
            typer.echo(piece, nl=False)
            sys.stdout.flush()
        typer.echo()


def _requests(generator: TextGenerator, texts: list[str], images: list[Path], sounds: list[Path]) -> list[Request]:
    """Raises ConfigError for images and sounds that the model does not take."""
    from mt_data.datasets.images.pixels import ImageFile
    from mt_infer.prompts import (
        deal_images,
        deal_sounds,
        image_data,
        read_images,
        read_sounds,
        takes_no_images,
        takes_no_sounds,
    )

    prompts, family = generator.prompts, generator.config.model.family
    if not (images or sounds):
        return [Request(text, text, {}) for text in texts]
    if images and not prompts.takes_images:
        raise ConfigError(f"--image: {takes_no_images(family)}")
    if sounds and not prompts.takes_sounds:
        raise ConfigError(f"--audio: {takes_no_sounds(family)}")
    data, requests = image_data(generator.config), []
    videos = prompts.takes_videos
    if not videos and (folder := next((path for path in images if path.is_dir()), None)) is not None:
        raise ConfigError(f"--image {folder} is a folder, which is a video: the model takes images alone")
    for text, files, heard in zip(texts, deal_images(texts, images), deal_sounds(texts, sounds), strict=True):
        read = read_images([ImageFile(path) for path in files], data, videos=videos)
        waves = read_sounds(heard, prompts.sound_tokens) if heard else []
        ids = prompts.with_pictures(text, read, sounds=waves) if files or heard else text
        requests.append(Request(text, ids, {**prompts.image_inputs(read), **prompts.sound_inputs(waves)}))
    return requests


def show_json(generator: TextGenerator, requests: list[Request], sampling: SamplingParameters) -> None:
    """All prompts together, in one batch. Raises ConfigError, after all lines, if one has an error."""
    prompts, inputs = [request.prompt for request in requests], [request.inputs for request in requests]
    completions = generator.generate(prompts, sampling, inputs)
    for request, answers in zip(requests, completions, strict=True):
        for index, done in enumerate(answers):
            typer.echo(json.dumps({"prompt": request.text, "index": index, **as_record(done)}, ensure_ascii=False))
    for done in chain.from_iterable(completions):
        done.require_complete()


def as_record(done: Completion) -> dict[str, object]:
    """What was requested of a sequence, for JSON."""
    return {name: value for name, value in asdict(done).items() if value not in (None, [])}


def read_prompts(prompts: list[str]) -> list[str]:
    """The texts; standard input in place of "-". Raises ConfigError where it is to be read twice."""
    if prompts.count(STANDARD_INPUT) > 1:
        raise ConfigError("--prompt - reads standard input to its end, so that it can be given once")
    return [sys.stdin.read() if prompt == STANDARD_INPUT else prompt for prompt in prompts]
