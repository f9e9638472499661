"""`mt retrieve serve`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from mt_core.commands import listed, need
from mt_core.errors import PluginError
from mt_retrieval.commands.options import CHECKPOINT, DEVICE, EVIDENCE, INDEX, SEARCH_PARAMETERS

LOOPBACK = "127.0.0.1"
EXTRA = ("fastapi", "uvicorn")


def serve(
    index: INDEX,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: this machine only.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: the system chooses one.")] = 8100,
    api_key: Annotated[
        str | None, typer.Option(envvar="MT_API_KEY", help="What requests have to bring.", show_default=False)
    ] = None,
    checkpoint: CHECKPOINT = None,
    evidence: EVIDENCE = None,
    search_parameters: SEARCH_PARAMETERS = None,
    device: DEVICE = "auto",
) -> None:
    """Serve an index over HTTP: POST /search with {"questions": ["..."], "top_k": 5}."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt retrieve serve")
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise PluginError(f'mt retrieve serve needs {listed(missing)}; pip install "mt-retrieval[server]"')
    from mt_infer.server.options import ServerOptions
    from mt_infer.server.running import address_of, listen, run_app
    from mt_infer.server.security import is_loopback
    from mt_retrieval.retriever import Retriever
    from mt_retrieval.server import create_app

    listening = listen(host or LOOPBACK, port)
    retriever = Retriever.open(
        index, checkpoint=checkpoint, evidence=evidence, device=device, search_parameters=search_parameters
    )
    app = create_app(retriever, ServerOptions(api_key=api_key or None, any_host=not is_loopback(host or LOOPBACK)))

    def announce() -> None:
        typer.echo(f"serving {len(retriever.index):,} passages at {address_of(listening)} (POST /search)")

    run_app(app, listening, on_ready=announce, drain_seconds=10)
