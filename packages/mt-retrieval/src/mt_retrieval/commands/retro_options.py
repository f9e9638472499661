"""Options that the commands of `mt retro` share, and the ranks that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mt_core.commands import need
from mt_core.errors import ConfigError
from mt_core.paths import as_path
from mt_infer.commands.layout import engine_settings, layout_of_ranks, start_ranks
from mt_retrieval.commands.options import progress_bar

if TYPE_CHECKING:
    from mt_retrieval.retro.embeddings import ChunkEmbedder

PROJECT = Annotated[
    Path, typer.Argument(parser=as_path, metavar="PROJECT", help="Folder. Killed, the same command continues there.")
]
DATA_PATH = Annotated[
    list[str], typer.Option("--data-path", help="Prefix of .bin and .idx, in Megatron's format. Repeatable.")
]
SPLIT = Annotated[str, typer.Option(help="Shares of train, validation and test of the documents; train is searched.")]
CHUNK_LENGTH = Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")]
DEDUPLICATE = Annotated[bool, typer.Option("--deduplicate", help="Keep one of chunks with equal tokens.")]
TOKENIZER_TYPE = Annotated[
    str | None, typer.Option(help="Tokenizer of the data. Default: the recorded one.", show_default=False)
]
TOKENIZER = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="A key of its section, such as where a file is now. Repeatable."),
]
EMBEDDER = Annotated[
    str, typer.Option(help="hashed-ngrams; or a run directory or checkpoint of a BERT or biencoder, of any format.")
]
SAME_EMBEDDER = Annotated[
    str | None, typer.Option("--embedder", help="Where the index's encoder is now.", show_default=False)
]
BATCH_SIZE = Annotated[int, typer.Option(min=1, help="Chunks of a forward pass.")]
BLOCK_ROWS = Annotated[int, typer.Option(min=1, help="Chunks of a file, which a killed run may lose on each rank.")]
INDEX = Annotated[
    str, typer.Option("--index", help="exact (NumPy), or faiss's description, such as OPQ32_64,IVF65536_HNSW8,PQ32.")
]
TRAIN_ROWS = Annotated[int | None, typer.Option(min=1, help="Chunks to train the index on. Default: all.")]
TEXT = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="Prefix of .bin and .idx whose chunks have neighbours. Repeatable. Default: those of the database.",
        show_default=False,
    ),
]
SEQ_LENGTH = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of a sample of training: neighbours are of none of its documents."),
]
EXCLUDE = Annotated[
    Literal["sample", "chunk"], typer.Option(help="Whose documents give no neighbours; sample needs --seq-length.")
]
NUM_NEIGHBORS = Annotated[int, typer.Option(min=1, help="Neighbours that are kept.")]
NUM_NEIGHBORS_QUERY = Annotated[int, typer.Option(min=1, help="Neighbours that are found.")]


def excluded_length(exclude: Literal["sample", "chunk"], seq_length: int | None) -> int | None:
    """Tokens of the samples whose documents give no neighbours; None: those of the chunk. Raises ConfigError."""
    if exclude == "sample" and seq_length is None:
        raise ConfigError(
            "give --seq-length, the data.seq_length of training, so that neighbours are of no document of a chunk's "
            "sample; or --exclude chunk, for those of the chunk alone"
        )
    return seq_length if exclude == "sample" else None


@contextmanager
def ranks(context: typer.Context, command: str, device: str, nproc: int | None) -> Iterator[None]:
    """The block is run by each of the ranks."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command=command)
    start_ranks(context, nproc)
    from mt_core.launch.session import rank_session
    from mt_core.train.build import resolve_device

    with rank_session(resolve_device(device).type):
        yield


def bars(title: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """A bar of the first rank, with the time left."""
    from mt_core.parallel.context import is_writer

    return progress_bar(title, shown=is_writer())


def say(text: str) -> None:
    """Once for all ranks."""
    from mt_core.parallel.context import is_writer

    if is_writer():
        typer.echo(text)


def database_options(
    split: str, chunk_length: int, deduplicate: bool, tokenizer_type: str | None, tokenizer: Sequence[str] | None
) -> Mapping[str, Any]:
    """Arguments of `build_database`."""
    from mt_data.tokenizers.recorded import tokenizer_entries

    return {
        "split": split,
        "chunk_length": chunk_length,
        "deduplicate": deduplicate,
        "tokenizer_type": tokenizer_type,
        "tokenizer_entries": tokenizer_entries(tokenizer or []),
    }


def embedder_of_index(project: Path, name: str | None, device: str, set_: Sequence[str] | None) -> ChunkEmbedder:
    from mt_retrieval.retro.database import database_tokenizer
    from mt_retrieval.retro.embeddings import recorded_embedder

    settings = layout_of_ranks(engine_settings(set_ or []))
    return recorded_embedder(project, database_tokenizer(project), name=name, device=device, settings=settings)
