"""`mt config init`: makes a configuration by a few questions."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.commands import host_of
from mt_core.errors import ConfigError

if TYPE_CHECKING:
    from mt_cli.wizard import Draft
    from mt_core.plugins import PluginHost

Number = Annotated[int | None, typer.Option(show_default=False)]


def init(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="The file to write.")] = Path("mt.toml"),
    model: Annotated[str | None, typer.Option(help="Preset, or Hugging Face folder.", show_default=False)] = None,
    data: Annotated[
        str | None, typer.Option(help="Paths of text or token files, builtin or mock.", show_default=False)
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or file, or bytes.", show_default=False)] = None,
    dataset_type: Annotated[str | None, typer.Option(help="Kind of samples.", show_default=False)] = None,
    encodings: Annotated[
        str | None, typer.Option(help="Of text that is no UTF-8, with white space between.", show_default=False)
    ] = None,
    json_key: Annotated[str | None, typer.Option(help="Key of the text in JSON lines.", show_default=False)] = None,
    seq_length: Number = None,
    processes: Number = None,
    tensor_parallel: Number = None,
    pipeline_parallel: Number = None,
    expert_parallel: Number = None,
    micro_batch_size: Number = None,
    global_batch_size: Number = None,
    steps: Number = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: defaults for what no option says.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Ask what to train, and write the configuration. An option answers its question."""
    from mt_cli.wizard import make_draft

    if out.exists() and not force:
        raise ConfigError(f"{out} exists; give another name, or --force")
    answers = {
        "model": model,
        "data": data,
        "tokenizer": tokenizer,
        "dataset-type": dataset_type,
        "encodings": encodings,
        "json-key": json_key,
        "seq-length": seq_length,
        "processes": processes,
        "tensor-parallel": tensor_parallel,
        "pipeline-parallel": pipeline_parallel,
        "expert-parallel": expert_parallel,
        "micro-batch-size": micro_batch_size,
        "global-batch-size": global_batch_size,
        "steps": steps,
    }
    # As text, since options and typed answers go through the same checks of the questions.
    given = {name: str(answer) for name, answer in answers.items() if answer is not None}
    host = host_of(context)
    draft = make_draft(host, _has_gpu(), given, None if yes else _ask, _tell)
    out.write_text(draft.toml(), encoding="utf-8")
    typer.echo(f"\nwritten to {out}:\n\n{draft.toml()}")
    _show_plan(draft, out, context, host)
    processes_option = f" --nproc {draft.processes}" if draft.processes > 1 else ""
    typer.echo(f"\ntrain with:  mt train {out}{processes_option}")


def _has_gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _ask(text: str, default: str) -> str:
    answer: str = typer.prompt(text, default=default)
    return answer.strip()


def _tell(problem: str) -> None:
    typer.echo(f"  {problem}", err=True)


def _show_plan(draft: Draft, out: Path, context: typer.Context, host: PluginHost) -> None:
    """What `mt plan` says of the file, where mt-tools is installed."""
    if "plan" not in host.commands.names():
        typer.echo("mt plan shows whether this fits into memory: pip install mt-tools")
        return
    # The command's function itself: mt-cli imports no other distribution, and mt-tools may be absent.
    host.commands.get("plan", key="mt config init").app.load()(
        context, config=out, world_size=draft.processes, machine="this"
    )
