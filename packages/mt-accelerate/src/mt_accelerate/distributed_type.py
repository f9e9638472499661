"""The kinds of distribution that programs compare `accelerator.distributed_type` with."""

from __future__ import annotations

from enum import StrEnum


class DistributedType(StrEnum):
    """Accelerate's names; an Accelerator of mt is MEGATRON_LM with the plugin, else NO, MULTI_CPU or MULTI_GPU."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
