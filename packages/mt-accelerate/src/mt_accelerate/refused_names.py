"""Names of Accelerate that mt does not have, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.errors import ConfigError, MtError

LAYOUTS = "other engines share the work here: give MegatronLMPlugin (TP, PP, CP, EP, ZeRO-1, FSDP2)"
OPTIONS: Mapping[str, str] = {
    "deepspeed_plugin": LAYOUTS + "; MegatronLMPlugin(use_distributed_optimizer=True) is ZeRO-1",
    "deepspeed_plugins": LAYOUTS + "; MegatronLMPlugin(use_distributed_optimizer=True) is ZeRO-1",
    "fsdp_plugin": LAYOUTS + "; MegatronLMPlugin(use_custom_fsdp=True) is FSDP2",
    "torch_tp_plugin": LAYOUTS + "; MegatronLMPlugin(tp_degree=...)",
    "parallelism_config": LAYOUTS + "; its sizes are fields of the plugin",
    "dynamo_backend": "call torch.compile(model) before prepare; models of mt have train.compile",
    "dynamo_plugin": "call torch.compile(model) before prepare; models of mt have train.compile",
}
"""Arguments of Accelerator."""
ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys(
        ("context_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank", "pipeline_parallel_rank"),
        "ranks on the axes of a layout are those of model.engine.ctx, for example model.engine.ctx.dp.rank",
    ),
    "tensor_parallel_rank": "it is model.engine.ctx.tp.rank",
    "torch_device_mesh": "the axes of a layout are those of model.engine.ctx",
    "maybe_context_parallel": "MegatronLMPlugin(context_parallel_size=...) divides sequences in the model's call",
    "deepspeed_ulysses_dl_adapter": "MegatronLMPlugin(context_parallel_size=...) divides sequences",
    "lomo_backward": "LOMO updates weights in the backward pass, before gradients are summed over ranks",
    "verify_device_map": "models are on one device each; from_pretrained(device_map=...) is for generation",
}
"""Attributes of Accelerator."""


class RefusedNameError(MtError, ImportError):
    """A name that Accelerate has and mt does not; the message has the reason."""


class RefusedAttributeError(MtError, AttributeError):
    """The same of an attribute."""


def refuse_options(**given: Any) -> None:
    """Raises ConfigError for those that are not None."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"Accelerator({name}=...): {OPTIONS[name]}")


def refuse_attribute(name: str) -> Any:
    """Raises RefusedAttributeError with the reason, AttributeError for a name that Accelerate does not have."""
    if name in ATTRIBUTES:
        raise RefusedAttributeError(f"accelerator.{name}: {ATTRIBUTES[name]}")
    raise AttributeError(f"Accelerator has no attribute {name!r}")
