"""`mt retrieve index`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mt_core.commands import need
from mt_core.errors import ConfigError
from mt_retrieval.commands.options import progress_bar


def index(
    embeddings: Annotated[Path, typer.Argument(metavar="EMBEDDINGS", help="A folder of mt retrieve embed.")],
    output: Annotated[Path, typer.Option(help="Folder of the index.")],
    type_: Annotated[
        Literal["flat", "ivf", "pq", "hnsw"] | None,
        typer.Option("--type", help="flat: exact; ivf: lists; pq: compressed; hnsw: a graph.", show_default="flat"),
    ] = None,
    factory: Annotated[
        str | None, typer.Option(help="In place of --type: faiss's description, such as OPQ32_64,IVF65536_HNSW8,PQ32.")
    ] = None,
    lists: Annotated[int | None, typer.Option(min=1, help="Of ivf. Default: 4 sqrt(passages).")] = None,
    pq_bytes: Annotated[int | None, typer.Option(min=1, help="Of each passage with pq. Default: width / 4.")] = None,
    train_rows: Annotated[int | None, typer.Option(min=1, help="Embeddings to train on. Default: all.")] = None,
) -> None:
    """Build an index of faiss, by inner product."""
    need("mt-data", command="mt retrieve index")
    from mt_retrieval.embeddings.reader import Embeddings
    from mt_retrieval.index.faiss_index import build_index, factory_of

    if factory is not None and (type_, lists, pq_bytes) != (None, None, None):
        raise ConfigError("--factory says what the index is; leave out --type, --lists and --pq-bytes")
    opened = Embeddings(embeddings)
    described = factory or factory_of(type_ or "flat", len(opened), opened.dim, lists, pq_bytes)
    with progress_bar("indexing") as update:
        record = build_index(opened, output, described, train_rows, update)
    size = (output / record.index.name).stat().st_size
    typer.echo(f"{output}: {described}, {record.count:,} passages, {size / 1e6:,.1f} MB")
