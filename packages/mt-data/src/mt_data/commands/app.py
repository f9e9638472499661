"""`mt data`: puts the commands of this folder together."""

from __future__ import annotations

import typer

from mt_data.commands.build_index import build_index
from mt_data.commands.clean import clean
from mt_data.commands.decontaminate import decontaminate
from mt_data.commands.dedup import dedup
from mt_data.commands.filter_urls import filter_urls
from mt_data.commands.inspect import inspect
from mt_data.commands.merge import MergeCommand, merge
from mt_data.commands.preprocess import PreprocessCommand, preprocess
from mt_data.commands.preview import preview
from mt_data.commands.train_tokenizer import train_tokenizer
from mt_data.commands.verify import verify
from mt_data.commands.where import where

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
