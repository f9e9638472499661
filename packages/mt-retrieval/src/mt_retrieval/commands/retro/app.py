"""`mt retro`: puts the commands of this folder together."""

from __future__ import annotations

import typer

from mt_retrieval.commands.retro import build, database
from mt_retrieval.commands.retro.index import add, train
from mt_retrieval.commands.retro.query import query
from mt_retrieval.commands.retro.verify import verify

app = typer.Typer(no_args_is_help=True, help="Chunk database, index and neighbours of a Retro project.")
db_app = typer.Typer(no_args_is_help=True, help="The chunk database.")
index_app = typer.Typer(no_args_is_help=True, help="The index of its chunks.")

db_app.command("build")(database.build)
index_app.command("train")(train)
index_app.command("add")(add)
app.add_typer(db_app, name="db")
app.add_typer(index_app, name="index")
app.command("query")(query)
app.command("build")(build.build)
app.command("verify")(verify)
