"""`mt serve`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.commands import listed, need
from mt_core.errors import ConfigError, PluginError
from mt_core.paths import as_path
from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, layout_of_ranks, start_ranks

if TYPE_CHECKING:
    import socket

    from mt_infer.server.options import ServerOptions
    from mt_infer.server.served_model import ServedModel

LOOPBACK = "127.0.0.1"
EXTRA = ("fastapi", "prometheus_client", "python_multipart", "uvicorn")


def serve(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(parser=as_path, metavar="PATH...", help="Run directories, or checkpoints of any format."),
    ],
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1, which this machine alone reaches.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: the system chooses one.")] = 8000,
    name: Annotated[
        list[str] | None, typer.Option(help="Name of a model in requests; repeatable. Default: its folder's.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="A PEFT folder, and its name in requests; repeatable, for one model."),
    ] = None,
    adapter_folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Requests may load the adapters in this folder, and unload them."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="MT_API_KEY", help="What requests have to bring.", show_default=False)
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="tokenizer, chatml, llama3, plain, or a Jinja file. Default: what it was trained with."),
    ] = None,
    tool_call_form: Annotated[
        str | None, typer.Option(help="Form of calls of tools, as hermes. Default: the one that the template shows.")
    ] = None,
    allowed_local_media_path: Annotated[
        list[Path] | None,
        typer.Option(
            parser=as_path, metavar="DIR", help="A folder whose images requests may name by file: URLs. Repeatable."
        ),
    ] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest body of a request, in MiB.")] = 8.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that a request may generate. Default: the context.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Sequences that may run or wait.")] = 1024,
    request_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(min=1, help="Seconds that requests have after SIGTERM.")] = 60.0,
    set_: SETTINGS = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    nproc: NPROC = None,
) -> None:
    """Serve models over HTTP: OpenAI's interface, Megatron's PUT /api, and a page."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt serve")
    _need_server()
    start_ranks(context, nproc)
    from mt_core.launch.environment import read_environment
    from mt_core.launch.session import rank_session
    from mt_core.train.build import resolve_device
    from mt_infer.adapters import named_folders
    from mt_infer.chat.chat_format import require_template
    from mt_infer.chat.tool_calls.form import registered_form
    from mt_infer.server.options import ServerOptions
    from mt_infer.server.running import listen
    from mt_infer.server.security import is_loopback
    from mt_infer.server.served_model import add_adapter, load_models, model_names

    options = ServerOptions(
        api_key=api_key or None,
        any_host=not is_loopback(host or LOOPBACK),
        max_body_bytes=int(max_body_mb * (1 << 20)),
        max_tokens=max_tokens,
        max_queue=max_queue,
        request_seconds=request_timeout,
        adapter_folder=adapter_folder,
        media_folders=media_folders(allowed_local_media_path or []),
    )
    model_names(paths, name or [])
    adapters = named_folders(adapter or [])
    if adapters and len(paths) > 1:
        raise ConfigError(f"--adapter is for one model, and {len(paths)} are served; start a server for each")
    require_template(chat_template)
    if tool_call_form is not None:
        registered_form(tool_call_form)
    settings = layout_of_ranks(engine_settings(set_ or []))
    # Before models are loaded, which may take minutes.
    listening = listen(host or LOOPBACK, port) if read_environment().rank == 0 else None
    with rank_session(resolve_device(device).type):
        models = load_models(
            paths,
            device=device,
            settings=settings,
            names=name or (),
            chat_template=chat_template,
            tool_call_form=tool_call_form,
        )
        for adapter_name, folder in adapters.items():
            models.append(add_adapter(models[0], adapter_name, folder))
        if listening is None:
            return _follow(models)
        return _serve(models, options, listening, drain_timeout)


def media_folders(folders: Sequence[Path]) -> tuple[Path, ...]:
    """Raises ConfigError for what is no folder."""
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--allowed-local-media-path {folder}: no such folder")
    return tuple(folders)


def _need_server() -> None:
    """Raises PluginError without the packages of the extra."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise PluginError(f'mt serve needs {listed(missing)}; pip install "mt-infer[server]"')


def _serve(models: list[ServedModel], options: ServerOptions, listening: socket.socket, drain_seconds: float) -> None:
    from mt_infer.server.running import address_of, serve
    from mt_infer.server.service import Service

    service = Service(models, options)

    def announce() -> None:
        names = ", ".join(service.models.by_name)
        typer.echo(f"serving {names} at {address_of(listening)} (page at /, OpenAI's interface at /v1)")

    serve(service, listening, on_ready=announce, drain_seconds=drain_seconds)
    # Not after a failure, in which the other ranks may wait for something else: the session ends them.
    for generator in service.models.generators:
        generator.close()


def _follow(models: list[ServedModel]) -> None:
    """On ranks other than 0: rank 0 says when to end, after it has answered what is open."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    generators = [model.generator for model in models if model.generator is not None and model.adapter is None]
    engines = [generator.engine for generator in generators]
    # Rank 0 steps them in turn, and closes them in turn.
    is_open = True
    while is_open:
        # min, not all(): every engine takes part in every turn, also behind one that has closed.
        is_open = min([engine.take_part() for engine in engines])
