"""The kinds of distribution that programs compare `accelerator.distributed_type` with."""

from __future__ import annotations

from enum import StrEnum


class DistributedType(StrEnum):
    """Accelerate's names; an Accelerator of mt is always MEGATRON_LM."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"
