"""`mt retrieve`: puts the commands of this folder together."""

from __future__ import annotations

import typer

from mt_retrieval.commands.embed import embed
from mt_retrieval.commands.evaluate import evaluate
from mt_retrieval.commands.index import index
from mt_retrieval.commands.mine import mine
from mt_retrieval.commands.search import search
from mt_retrieval.commands.serve import serve

app = typer.Typer(no_args_is_help=True, help="Embed, index and search passages; measure recall.")

app.command("embed")(embed)
app.command("index")(index)
app.command("search")(search)
app.command("evaluate")(evaluate)
app.command("mine")(mine)
app.command("serve")(serve)
