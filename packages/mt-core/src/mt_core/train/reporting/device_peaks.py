"""Peak rates of known GPUs, which MFU is a fraction of."""

from __future__ import annotations

import re

import torch

from mt_core.config.schema import LoggingConfig

DENSE_BF16_TFLOPS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("B200", 2250.0),
    ("GB200", 2500.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("MI300X", 1307.4),
)
"""(words of the device's name, TFLOP/s), as vendors state them, without sparsity. The first that matches counts."""


def peak_tflops(device: torch.device, config: LoggingConfig) -> float | None:
    """TFLOP/s of the device in bf16, whatever the run's dtype is; None for one that is not known."""
    if config.device_peak_tflops is not None:
        return config.device_peak_tflops
    return peak_of_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of_name(name: str) -> float | None:
    """name: as torch.cuda.get_device_name has it, such as "NVIDIA A100-SXM4-80GB"."""
    # Whole words, as "H20" is a part of "H200" and "A10" of "A100".
    words = set(re.findall(r"\w+", name))
    return next((peak for known, peak in DENSE_BF16_TFLOPS if words.issuperset(known.split())), None)
