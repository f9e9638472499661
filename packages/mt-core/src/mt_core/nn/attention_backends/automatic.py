"""`model.attention_backend=auto`: the first backend of an order that serves a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mt_core.plugins import PluginHost
from mt_core.specs import AttentionRequest

AUTO = "auto"
ON_CUDA = ("cudnn", "flash_attn_4", "flash_attn_3", "flash_attn_2", "sdpa", "flex", "eager")
ELSEWHERE = ("sdpa", "eager")
FLASH = frozenset({"flash_attn_4", "flash_attn_3", "flash_attn_2"})
"""Taken for causal attention without a bias alone: padded keys and relative biases come with a batch, and these
packages have no masks."""


def automatic_backend(request: AttentionRequest, host: PluginHost) -> tuple[str, Mapping[str, str]]:
    """(name, why those before it in the order do not serve). Fastest first, as others have measured them on Hopper."""
    refused: dict[str, str] = {}
    for name in _order(request):
        answer = host.attention_backends.get(name, key="model.attention_backend").supports.load()(request)
        if answer is True:
            return name, refused
        refused[name] = str(answer)
    # supports_eager is always True, and eager ends both orders.
    raise AssertionError("eager serves every request")


def _order(request: AttentionRequest) -> Iterator[str]:
    names = ON_CUDA if request.device_type == "cuda" else ELSEWHERE
    plain = request.causal and not request.bias
    return (name for name in names if plain or name not in FLASH)
