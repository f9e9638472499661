"""`mt data`: puts the commands of this folder together."""

from __future__ import annotations

import typer

from mt_data.commands.corpora import clean, decontaminate, dedup, filter_urls
from mt_data.commands.preprocess import PreprocessCommand, preprocess
from mt_data.commands.run_data import build_index, preview, where
from mt_data.commands.token_files import MergeCommand, inspect, merge, verify
from mt_data.commands.train_tokenizer import train_tokenizer

app = typer.Typer(no_args_is_help=True, help="Prepare, inspect, verify and filter data.")

PREPARING, LOOKING, CORPUS = "Preparing", "Looking", "Building a corpus"

app.command("preprocess", cls=PreprocessCommand, rich_help_panel=PREPARING)(preprocess)
app.command("merge", cls=MergeCommand, rich_help_panel=PREPARING)(merge)
app.command("train-tokenizer", rich_help_panel=PREPARING)(train_tokenizer)
app.command("build-index", rich_help_panel=PREPARING)(build_index)
app.command("inspect", rich_help_panel=LOOKING)(inspect)
app.command("verify", rich_help_panel=LOOKING)(verify)
app.command("preview", rich_help_panel=LOOKING)(preview)
app.command("where", rich_help_panel=LOOKING)(where)
app.command("clean", rich_help_panel=CORPUS)(clean)
app.command("dedup", rich_help_panel=CORPUS)(dedup)
app.command("decontaminate", rich_help_panel=CORPUS)(decontaminate)
app.command("filter-urls", rich_help_panel=CORPUS)(filter_urls)
