"""`mt config`: make, show, validate and explain the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.checkpoint_specs import CHECKPOINT_SAVERS
from mt_core.commands import host_of
from mt_core.config.files import shown, to_toml
from mt_core.errors import ConfigError
from mt_core.specs import ATTENTION_BACKENDS, CALLBACKS, COMMANDS, FEED_FORWARDS

if TYPE_CHECKING:
    from rich.table import Table

    from mt_cli.config_fields import ConfigField
    from mt_cli.wizard import Draft
    from mt_core.config.loading import LoadedConfig
    from mt_core.plugins import PluginHost


# -- init --------------------------------------------------------------------------------------------

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
    answer_texts = {name: str(answer) for name, answer in answers.items() if answer is not None}
    host = host_of(context)
    draft = make_draft(host, _has_gpu(), answer_texts, None if yes else _ask, _tell)
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
    if "plan" not in host[COMMANDS].names():
        typer.echo("mt plan shows whether this fits into memory: pip install mt-tools")
        return
    # The command's function itself: mt-cli imports no other distribution, and mt-tools may be absent.
    host[COMMANDS].get("plan", key="mt config init").app.load()(
        context, config=out, world_size=draft.processes, machine="this"
    )


app = typer.Typer(no_args_is_help=True, help="Make, show, check and explain the configuration.")
app.command()(init)

ConfigPath = Annotated[
    Path | None,
    typer.Argument(help="TOML, YAML or JSON file, or a run directory for its configuration.", show_default=False),
]
Preset = Annotated[str | None, typer.Option(help="Values to start from; mt models lists presets.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; repeatable.", show_default=False),
]


@app.command()
def show(
    context: typer.Context,
    config: ConfigPath = None,
    preset: Preset = None,
    set_: Overrides = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, which mt train takes as it is.")] = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print TOML, which mt train takes as it is.")] = False,
) -> None:
    """Show every value that training would use. Without a file or preset: those of plain `mt train`."""
    if as_json and as_toml:
        raise ConfigError("--json and --toml cannot be given together; choose one")
    loaded = load(host_of(context), config, preset, set_)
    if as_json:
        typer.echo(json.dumps(_with_origins(loaded) if origin else loaded.config.to_dict(), indent=2))
    elif as_toml:
        typer.echo(toml_text(loaded, origin=origin), nl=False)
    else:
        _console().print(_value_table(loaded, origin=origin))


@app.command()
def validate(context: typer.Context, config: ConfigPath = None, preset: Preset = None, set_: Overrides = None) -> None:
    """Check a configuration as training would, without building anything."""
    host = host_of(context)
    loaded = load(host, config, preset, set_)
    check_names(loaded, host)
    count = sum(not entry.startswith("preset") for entry in loaded.origins.values())
    source = f"{config or 'the configuration'}" + (f" with preset {loaded.preset}" if loaded.preset else "")
    typer.echo(f"{source} is valid ({count} value{'s' * (count != 1)} set on top)")


# `mt config explain --num-layers`: an option of Megatron-LM is the argument here.
@app.command(context_settings={"ignore_unknown_options": True})
def explain(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="section.key, only key, or an option of Megatron-LM.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a key means, what it can be, its default, when it counts, and what Megatron and others call it."""
    from mt_cli.config_fields import find_fields, keys_called, names_of, sentences_about

    host = host_of(context)
    # Options of other software that stand for no key are answered by the plugin that registers their names.
    if sentences := sentences_about(key, host):
        return typer.echo("\n".join(sentences))
    # First as a name of other software, which may stand for several keys; else as a key.
    fields = [field for name in keys_called(key, host) or [key] for field in find_fields(name, host)]
    names = {field.dotted: names_of(field.dotted, host) for field in fields}
    if as_json:
        return typer.echo(json.dumps([{**_as_dict(field), "names": names[field.dotted]} for field in fields], indent=2))
    for position, field in enumerate(fields):
        if position:
            typer.echo()
        _console().print(_explanation(field, names[field.dotted]))
    return None


@app.command()
def keys(
    context: typer.Context,
    section: Annotated[
        str | None, typer.Argument(help="Only this section, or a table in it such as model.moe.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the keys of the configuration, with type, default and meaning."""
    from mt_cli.config_fields import require_section, section_fields, section_names

    host = host_of(context)
    every = section_names(host)
    chosen = require_section(section, host) if section else ""
    sections = [name for name in every if not chosen or name == chosen or name.startswith(f"{chosen}.")]
    fields = [field for name in sections for field in section_fields(name, host)]
    if as_json:
        typer.echo(json.dumps([_as_dict(field) for field in fields], indent=2))
    else:
        _print_keys(fields)


def load(host: PluginHost, path: Path | None, preset: str | None, overrides: list[str] | None) -> LoadedConfig:
    """The configuration that `mt train` would use with these arguments; a run directory means its config.json."""
    from mt_cli.commands.train import DEFAULT_PRESET
    from mt_core.config.loading import load_config_anywhere

    if path is not None and path.is_dir():
        # The resolved configuration that training wrote there.
        path = path / "config.json"
    return load_config_anywhere(
        path, preset=preset, overrides=overrides or (), host=host, default_preset=DEFAULT_PRESET
    )


def check_names(loaded: LoadedConfig, host: PluginHost) -> None:
    """Raise PluginError for a name that no plugin registers, among those that training looks up as it starts."""
    from mt_core.config.metrics import configured_loss
    from mt_core.nn.kernels.choice import AUTO

    config = loaded.config
    configured_loss(config, host)
    host[CHECKPOINT_SAVERS].get(config.checkpoint.ckpt_format, key="checkpoint.ckpt_format")
    for key, names in (("train.callbacks", config.train.callbacks), ("logging.trackers", config.logging.trackers)):
        for name in names:
            host[CALLBACKS].get(name, key=key)
    backend = getattr(config.model, "attention_backend", None)
    if backend not in (None, AUTO):
        host[ATTENTION_BACKENDS].get(backend, key="model.attention_backend")
    if getattr(config.model, "moe", None) is not None:
        host[FEED_FORWARDS].get("moe", key="model.moe")


def toml_text(loaded: LoadedConfig, *, origin: bool = False) -> str:
    """A TOML file of all values. A null that is no default cannot be written, and becomes a comment."""
    lines: list[str] = []
    for section, values in loaded.config.to_dict().items():
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        fields = type(loaded.config.named(section)).model_fields
        for key, value in values.items():
            comment = f"  # {loaded.origin(f'{section}.{key}')}" if origin else ""
            if value is not None:
                lines.append(f"{key} = {to_toml(value)}{comment}")
            # A null that is the default may be left out; any other one would silently become the default again.
            elif fields[key].get_default(call_default_factory=True) is not None:
                lines.append(f"# {key} is null, which TOML lacks: add --set {section}.{key}=null")
    return "\n".join(lines) + "\n"


def _with_origins(loaded: LoadedConfig) -> dict[str, dict[str, Any]]:
    return {
        section: {key: {"value": value, "origin": loaded.origin(f"{section}.{key}")} for key, value in values.items()}
        for section, values in loaded.config.to_dict().items()
    }


def _value_table(loaded: LoadedConfig, *, origin: bool) -> Table:
    """Section headings and their values; what is not a default stands out."""
    from rich.text import Text

    table = _new_table()
    for section, values in loaded.config.to_dict().items():
        if table.row_count:
            table.add_row()
        table.add_row(Text(f"[{section}]", style="bold"))
        for key, value in values.items():
            source = loaded.origin(f"{section}.{key}")
            style = "dim" if source == "default" else ""
            cells = [Text(f"  {key}", style), Text(shown(value), style or "cyan")]
            table.add_row(*cells, *([Text(source, "dim")] if origin else []))
    return table


def _print_keys(fields: list[ConfigField]) -> None:
    """Keys under their section, and under the choice that brings them."""
    console, width = _console(), max((len(field.key) for field in fields), default=0) + 2
    # Headings stand outside of the tables: in a column they would leave meanings no space on a narrow terminal.
    for number, (heading, group) in enumerate(groupby(fields, _heading)):
        console.print(*([""] if number else []), heading, style="bold", markup=False, soft_wrap=True, sep="\n")
        console.print(_key_table(group, width))


def _key_table(fields: Iterable[ConfigField], width: int) -> Table:
    """width: of the column of keys, which several tables have in common."""
    from rich.text import Text

    table = _new_table()
    table.columns[0].min_width = width
    for field in fields:
        default = "required" if field.default == "required" else f"default {field.default}"
        meaning = Text(field.doc).append(f"\n{field.type}; {default}", style="dim")
        if field.conditions:
            meaning.append(f"\nonly when {field.condition()}", style="dim")
        table.add_row(Text(f"  {field.key}"), meaning)
    return table


def _heading(field: ConfigField) -> str:
    choice = _choice(field).removeprefix(f"{field.section}.")
    return f"[{field.section}] with {choice}" if choice else f"[{field.section}]"


def _choice(field: ConfigField) -> str:
    """'optimizer.optimizer = "adam"', or nothing for a key that is always there."""
    from mt_cli.config_fields import selector

    key = selector(field.section)
    return f"{key} = {' or '.join(map(shown, field.selected_by))}" if key and field.selected_by else ""


def _explanation(field: ConfigField, names: Mapping[str, Sequence[str]]) -> Table:
    from rich.text import Text

    table = _new_table()
    table.title = field.dotted
    table.title_justify, table.title_style = "left", "bold"
    table.add_row(Text("meaning", "dim"), Text(field.doc))
    table.add_row(Text("type", "dim"), Text(field.type))
    table.add_row(Text("default", "dim"), Text(field.default))
    if field.conditions:
        table.add_row(Text("counts", "dim"), Text(f"only when {field.condition()}"))
    if choice := _choice(field):
        table.add_row(Text("needs", "dim"), Text(choice))
    for software, words in names.items():
        table.add_row(Text(software, "dim"), Text(", ".join(words)))
    return table


def _as_dict(field: ConfigField) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(field)


def _new_table() -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)
