"""`mt retrieve`: embed, index and search passages; measure recall, mine negatives, serve."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mt_core.commands import listed, need
from mt_core.errors import ConfigError, PluginError
from mt_core.paths import as_path, write_whole
from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, layout_of_ranks, start_ranks
from mt_retrieval.commands.options import CHECKPOINT, DEVICE, EVIDENCE, INDEX, SEARCH_PARAMETERS, progress_bar
from mt_retrieval.embeddings import BATCH_SIZE, SHARD_ROWS

if TYPE_CHECKING:
    from mt_retrieval.evaluation import Searcher


def embed(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(parser=as_path, metavar="CHECKPOINT", help="A run directory, or a checkpoint of any format."),
    ],
    evidence: Annotated[
        str,
        typer.Argument(
            metavar="EVIDENCE",
            help="A TSV file with the columns id, text and title, or the prefix of an indexed data set of sentences.",
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder of the embeddings. Killed, the same command continues there.")],
    seq_length: Annotated[
        int | None, typer.Option(min=8, help="Tokens of a passage. Default: those of training.", show_default=False)
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Passages of a forward pass.")] = BATCH_SIZE,
    shard_rows: Annotated[int, typer.Option(min=1, help="Passages of a file.")] = SHARD_ROWS,
    set_: SETTINGS = None,
    device: DEVICE = "auto",
    nproc: NPROC = None,
) -> None:
    """Embed passages: fp16 shards with a manifest, by any number of ranks."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt retrieve embed")
    start_ranks(context, nproc)
    from mt_core.launch.session import rank_session
    from mt_core.parallel.context import is_writer
    from mt_core.train.build import resolve_device
    from mt_retrieval.embedding_writer import embed_evidence
    from mt_retrieval.encoder import Encoder
    from mt_retrieval.retriever import evidence_of

    settings = layout_of_ranks(engine_settings(set_ or []))
    with rank_session(resolve_device(device).type):
        encoder = Encoder.load(checkpoint, device=device, settings=settings, seq_length=seq_length)
        passages = evidence_of(evidence, encoder)
        with progress_bar("embedding", shown=is_writer()) as update:
            manifest = embed_evidence(
                encoder, passages, output, shard_rows=shard_rows, batch_size=batch_size, on_progress=update
            )
        if is_writer():
            typer.echo(
                f"{output}: {manifest.job.count:,} embeddings of width {manifest.dim} in {len(manifest.shards)} shards"
            )


# -- index -------------------------------------------------------------------------------------------


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
    from mt_retrieval.embeddings import Embeddings
    from mt_retrieval.index import build_index, factory_of

    if factory is not None and (type_, lists, pq_bytes) != (None, None, None):
        raise ConfigError("--factory says what the index is; leave out --type, --lists and --pq-bytes")
    opened = Embeddings(embeddings)
    described = factory or factory_of(type_ or "flat", len(opened), opened.dim, lists, pq_bytes)
    with progress_bar("indexing") as update:
        record = build_index(opened, output, described, train_rows, update)
    size = (output / record.index.name).stat().st_size
    typer.echo(f"{output}: {described}, {record.count:,} passages, {size / 1e6:,.1f} MB")


# -- search ------------------------------------------------------------------------------------------


def search(
    index: INDEX,
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION...")],
    top_k: Annotated[int, typer.Option(min=1, help="Passages of each question.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each question.")] = False,
    checkpoint: CHECKPOINT = None,
    evidence: EVIDENCE = None,
    search_parameters: SEARCH_PARAMETERS = None,
    device: DEVICE = "auto",
) -> None:
    """Show the passages with the highest scores."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt retrieve search")
    from mt_retrieval.retriever import Retriever

    retriever = Retriever.open(
        index, checkpoint=checkpoint, evidence=evidence, device=device, search_parameters=search_parameters
    )
    for question, passages in zip(questions, retriever.search(questions, top_k), strict=True):
        if as_json:
            record = {"question": question, "passages": [passage.as_record() for passage in passages]}
            typer.echo(json.dumps(record, ensure_ascii=False))
            continue
        typer.echo(question)
        for scored in passages:
            typer.echo(f"  {scored.score:8.3f}  [{scored.passage.id}] {scored.passage.title}: {scored.passage.text}")


# -- evaluate ----------------------------------------------------------------------------------------


def evaluate(
    index: INDEX,
    questions: Annotated[
        Path,
        typer.Argument(metavar="QUESTIONS", help="A line each: question, tab, list of answers (Natural Questions)."),
    ],
    top_k: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable.", show_default="1 5 20 100")] = None,
    match: Annotated[
        Literal["string", "regex"], typer.Option(help="Whether answers are texts or regular expressions.")
    ] = "string",
    output: Annotated[
        Path | None, typer.Option(help="JSON file of the result and what it was computed with.", show_default=False)
    ] = None,
    question_embeddings: Annotated[
        Path | None,
        typer.Option(help="A .npy file with a row for each question, in place of the encoder.", show_default=False),
    ] = None,
    checkpoint: CHECKPOINT = None,
    evidence: EVIDENCE = None,
    search_parameters: SEARCH_PARAMETERS = None,
    device: DEVICE = "auto",
) -> None:
    """Measure recall: the share of questions with an answer in the first k passages."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt retrieve evaluate")
    if question_embeddings is not None and checkpoint is not None:
        raise ConfigError("--question-embeddings are in place of --checkpoint; give one of them")
    from mt_data.questions import read_questions
    from mt_retrieval.evaluation import measure_recall

    asked, wanted = read_questions(questions), sorted(set(top_k or (1, 5, 20, 100)))
    searcher = _opened(index, question_embeddings, checkpoint, evidence, search_parameters, device)
    with progress_bar("searching") as update:
        search_result = searcher.find(asked, wanted[-1], update)
    with progress_bar("matching") as update:
        recall = measure_recall(asked, search_result.rows, searcher.evidence, match, update)
    values = {str(k): recall.at(k) for k in wanted}
    for k, value in values.items():
        typer.echo(f"recall@{k:<4} {value:.4f}")
    if output is not None:
        result = {"recall": values, "questions": len(asked), "match": match, **searcher.origin(questions)}
        write_whole(output, (json.dumps(result, indent=1) + "\n").encode())


def _opened(
    index: Path,
    question_embeddings: Path | None,
    checkpoint: Path | None,
    evidence: str | None,
    search_parameters: str | None,
    device: str,
) -> Searcher:
    from mt_retrieval.evaluation import EmbeddedQuestions, EncodedQuestions
    from mt_retrieval.retriever import Retriever

    if question_embeddings is not None:
        return EmbeddedQuestions.open(index, question_embeddings, evidence, search_parameters)
    return EncodedQuestions(
        Retriever.open(
            index, checkpoint=checkpoint, evidence=evidence, device=device, search_parameters=search_parameters
        )
    )


# -- mine --------------------------------------------------------------------------------------------


def mine(
    index: INDEX,
    questions: Annotated[Path, typer.Argument(metavar="QUESTIONS", help="Training questions, in DPR's JSON format.")],
    output: Annotated[Path, typer.Option(help="The same questions with mined hard negatives, to train on.")],
    negatives: Annotated[int, typer.Option(min=1, help="Hard negatives of each question.")] = 30,
    checkpoint: CHECKPOINT = None,
    evidence: EVIDENCE = None,
    search_parameters: SEARCH_PARAMETERS = None,
    device: DEVICE = "auto",
) -> None:
    """Find hard negatives: passages with high scores that do not have an answer."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt retrieve mine")
    from mt_retrieval.mining import mine_negatives
    from mt_retrieval.retriever import Retriever

    retriever = Retriever.open(
        index, checkpoint=checkpoint, evidence=evidence, device=device, search_parameters=search_parameters
    )
    with progress_bar("searching") as update:
        count = mine_negatives(retriever, questions, output, negatives, update)
    typer.echo(f"{output}: {count:,} hard negatives")


# -- serve -------------------------------------------------------------------------------------------

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


# -- the app -----------------------------------------------------------------------------------------

app = typer.Typer(no_args_is_help=True, help="Embed, index and search passages; measure recall.")

app.command("embed")(embed)
app.command("index")(index)
app.command("search")(search)
app.command("evaluate")(evaluate)
app.command("mine")(mine)
app.command("serve")(serve)
