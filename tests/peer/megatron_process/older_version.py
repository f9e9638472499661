"""What an older Megatron-Core computes from a distributed checkpoint; its wheel has no `megatron.training`.

    python older_version.py FOLDER REQUEST ANSWER

FOLDER has the version (`pip install --target`). REQUEST, of torch.save: model, of `declared_names.make`, norm_epsilon,
checkpoint and tokens [batch, sequence]. It is loaded with Megatron's own `dist_checkpointing.load`, "raise_all", then
into its model, strictly. ANSWER: logits [batch, sequence, padded vocabulary].
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import cuda_on_cpu
import torch
from torch import Tensor


def main() -> None:
    folder, request, answer = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    cuda_on_cpu.apply_before_import()
    import declared_names

    declared_names.install_kernels()
    declared_names.start(folder, "local")
    os.environ.pop("NVTE_FLASH_ATTN")  # of Transformer Engine; this version wants what it sets itself
    asked = torch.load(request)
    if sizes := declared_names.DECODERS[asked["model"]]:  # those of gpt are Megatron's defaults, this one too
        sizes["layernorm_epsilon"] = asked["norm_epsilon"]
    model = declared_names.make(asked["model"], True)
    _load(model, asked["checkpoint"])
    torch.save(_logits(model.eval(), asked["tokens"]), answer)


def _load(model: Any, checkpoint: str) -> None:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint, strict="raise_all")
    model.load_state_dict(loaded["model"], strict=True)


def _logits(model: Any, tokens: Tensor) -> Tensor:
    length = tokens.shape[1]
    ahead = torch.ones(1, 1, length, length).tril() < 0.5
    with torch.no_grad():
        found: Tensor = model(tokens, torch.arange(length)[None].expand_as(tokens), ahead)
    return found


if __name__ == "__main__":
    main()
