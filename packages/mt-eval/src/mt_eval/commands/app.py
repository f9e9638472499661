"""`mt eval`: a command for each kind of measurement."""

from __future__ import annotations

import typer

from mt_eval.commands.classification import classification, ensemble, finetune
from mt_eval.commands.comparison import compare, contamination
from mt_eval.commands.detoxification import detoxify, toxicity
from mt_eval.commands.generation import generation, qa, vqa
from mt_eval.commands.harness import harness
from mt_eval.commands.perplexity import lambada, ppl, wikitext103

app = typer.Typer(no_args_is_help=True, help="Measure a trained model.")
app.command()(ppl)
app.command()(wikitext103)
app.command()(lambada)
app.command()(classification)
app.command()(ensemble)
app.command()(finetune)
app.command()(toxicity)
app.command()(detoxify)
app.command()(harness)
app.command()(generation)
app.command()(compare)
app.command()(contamination)
app.command()(vqa)
app.command()(qa)
