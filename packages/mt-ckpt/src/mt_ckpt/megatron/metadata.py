"""What a reader of Megatron's formats says beside the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_ckpt.megatron.argument_list import unknown_arguments
from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.run_arguments import run_sections
from mt_ckpt.pickles.inert_objects import plain
from mt_core.errors import ConfigError

KEY = "megatron"
"""Of the metadata: what Megatron's files say, unchanged."""
LEFT_OUT = "optimizer_left_out"
"""Below it: why an optimizer that is in the files is not read."""
CARRIED = ("checkpoint_version", "opt_param_scheduler", "num_floating_point_operations_so_far")


def metadata_of(args: Arguments, common: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values. common: what is the same on all ranks. section: [model]."""
    return {
        "iteration": int(common.get("iteration", 0) or 0),
        "consumed_samples": int(args.get("consumed_train_samples", 0)),
        "skipped_iterations": 0,
        "config": {"model": dict(section), **run_sections(args)},
        KEY: {
            "args": plain(args.values),
            "unknown_arguments": unknown_arguments(args.values),
            **{name: plain(common[name]) for name in CARRIED if name in common},
        },
    }


def optimizer_left_out(metadata: Mapping[str, Any]) -> str | None:
    """The reason, of a checkpoint of any format."""
    carried = metadata.get(KEY)
    return carried.get(LEFT_OUT) if isinstance(carried, Mapping) else None


def true_vocab_size(args: Arguments, padded: int, given: int | None) -> int:
    """Rows of the vocabulary that stand for ids.

    given: by the caller. Else the args say it where the run needed it (--vocab-size); the number that a
    tokenizer gave is not kept by Megatron, so that all rows count. Raises ConfigError for more rows than there are.
    """
    if given is not None:
        if not 0 < given <= padded:
            raise ConfigError(f"vocab_size={given}: {args.origin} has {padded} rows; it can be 1 to {padded}")
        return given
    said = args.values.get("vocab_size")
    if said is None:
        return padded
    counts_end = args.get("tokenizer_type") == "NullTokenizer" and "null_tokenizer_eod_id" not in args.values
    return min(int(said) + counts_end, padded)  # that tokenizer used to add its end of document to what it was given
