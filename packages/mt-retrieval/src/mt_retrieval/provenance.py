"""What identifies an encoder, and what a result records of its origin."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch

from mt_core.config.schema import Config
from mt_core.parallel.context import ParallelContext
from mt_core.specs import CheckpointReader, Tokenizer
from mt_core.versions import installed_versions

DISTRIBUTIONS = ("mt-core", "mt-data", "mt-infer", "mt-models", "mt-retrieval", "torch", "numpy", "faiss-cpu")
WEIGHTS = "model."


def encoder_fingerprint(reader: CheckpointReader, tokenizer: Tokenizer) -> str:
    """SHA-256 of the weights as they are stored and of the tokenizer, whatever the format and place of the files."""
    digest = sha256(tokenizer.fingerprint().encode())
    # Sorted, and without optimizer state: the same weights in another format or file layout have the same hash.
    for name in sorted(name for name in reader.shapes() if name.startswith(WEIGHTS)):
        tensor = reader.read(name).contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        # Bytes, since NumPy has no bf16.
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Of what is installed."""
    return installed_versions(DISTRIBUTIONS)


def computation(config: Config, ctx: ParallelContext) -> dict[str, Any]:
    """Versions, layout and precision of a computation by a model."""
    return {
        "versions": versions(),
        "layout": {name: ctx.axis(name).size for name in ("tp", "dp")},
        "precision": config.precision.dtype,
        "device": ctx.device.type,
    }
