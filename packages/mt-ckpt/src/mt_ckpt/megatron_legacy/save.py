"""Writes a checkpoint with the names from before Megatron-Core (version 3.0), for tools that read those.

The names are those of 2021 to 2023: `language_model.encoder.layers.0.self_attention.query_key_value.weight`. Only the
model is written: load it with --no-load-optim --no-load-rng, or --finetune.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mt_ckpt.megatron.names import OUTPUT
from mt_ckpt.megatron.rank_plan import RankEntry
from mt_ckpt.megatron.save import RankFiles, save_ranks
from mt_ckpt.megatron.target import Plan, make_plan
from mt_ckpt.megatron.write_arguments import LOCAL
from mt_ckpt.megatron_legacy.names import is_bert, nested, to_old
from mt_ckpt.pickles.encode import Call
from mt_ckpt.writing.options import refuse_megatron
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost


def convert_checkpoint(path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> None:
    """Write `source` as a `--save` folder of Megatron-LM's old models: the tracker file and one iteration.

    Raises ConfigError for options and models that Megatron cannot have, CheckpointError for parameters that its old
    models did not have, and OSError.
    """
    save_ranks(path, plan_files(source, options, host), options)


def plan_files(source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> RankFiles:
    """The files of `convert_checkpoint` that hold tensors; raises ConfigError and CheckpointError as that does."""
    refuse_megatron("megatron-legacy", options, "its names are those from before Megatron-Core")
    plan = make_plan(source, options, host, "torch")
    # Only for the error: a parameter without an old name is refused before anything is written.
    for name in plan.layouts:
        to_old(name, copied=False)
    if plan.config.model.family == "bert" and not is_bert(plan.layouts):
        raise ConfigError(
            "a BERT without token types and heads has the names of a GPT in the format megatron-legacy; use megatron"
        )
    old_args = {**plan.args, "transformer_impl": LOCAL, "use_legacy_models": True}
    return RankFiles(replace(plan, args=old_args, states=()), host, _old_model)


def _old_model(weights: Mapping[str, Call], entries: Sequence[RankEntry], plan: Plan, last: bool) -> dict[str, Any]:
    copied = OUTPUT not in plan.layouts
    return nested({to_old(entry.stored, copied=copied): weights[entry.stored] for entry in entries})
