"""Scales of inputs and of the key-value cache that a calibrated folder in FP8 has beside its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_core.errors import CheckpointError

INPUTS = ("input_scale", "activation_scale")
CACHE = ("k_scale", "v_scale", "k_cache_scale", "v_cache_scale")


class ActivationScales:
    """sources: canonical name of a weight -> the stored weights that it is made of. stored: tensors as they are in the
    files."""

    def __init__(self, stored: ExternalTensors, sources: Callable[[str], Sequence[str]]) -> None:
        self._stored, self._sources = stored, sources

    def of_inputs(self, name: str) -> float | None:
        """By which inputs are divided for FP8: the largest of what the weight is made of. None: one has no scale."""
        all_scales: list[float] = []
        for module in self._modules(name):
            scales = self._named(f"{module}.{scale}" for scale in INPUTS)
            if not scales:
                return None
            all_scales += scales
        return max(all_scales, default=None)

    def of_cache(self, name: str) -> float | None:
        """The same of the keys and values that a weight makes."""
        modules = self._modules(name)
        places = dict.fromkeys([*modules, *(module.rpartition(".")[0] for module in modules)])
        return max(self._named(f"{place}.{scale}" for place in places for scale in CACHE), default=None)

    def _modules(self, name: str) -> list[str]:
        """Modules of stored weights in e4m3; [] where another one is among them."""
        weights = self._sources(name)
        infos: Mapping[str, object] = self._stored.infos
        is_fp8 = all(weight in infos and self._stored.infos[weight].dtype == torch.float8_e4m3fn for weight in weights)
        return [weight.removesuffix(".weight") for weight in weights] if is_fp8 else []

    def _named(self, names: Iterable[str]) -> list[float]:
        return [self._number(name) for name in names if name in self._stored.infos]

    def _number(self, name: str) -> float:
        """Raises CheckpointError for a scale that is none."""
        values = self._stored.read(name).float()
        if values.numel() != 1 or not values.isfinite().all() or values.min() <= 0:
            raise CheckpointError(f"{name}: a scale of activations is one number above 0, not {values.tolist()}")
        return float(values)
