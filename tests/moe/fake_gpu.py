"""Lets MoE layers on the meta device take the kernels of a GPU, whose launches are counted and not done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from mt_moe.experts.loop import GroupedProduct


def act_as_a_gpu(patch: Callable[[Any, str, Any], None], launched: Counter[str]) -> None:
    """patch: setattr, or monkeypatch's. launched: receives the launches of Triton kernels by name."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    from mt_moe import layer
    from mt_moe.experts import experts
    from mt_moe.kernels import tiles
    from mt_moe.kernels.rows import TRITON_ROWS

    load = experts.load_product

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        launched[self.fn.__name__] += 1

    def run_timed(self: Any, *args: Any, **kwargs: Any) -> None:
        launched[self.base_fn.__name__] += 1

    def product_of_a_gpu(name: Any, device_type: str = "cuda") -> GroupedProduct:
        return load(name)

    patch(JITFunction, "run", run)
    patch(Autotuner, "run", run_timed)
    patch(layer, "row_kernels", lambda config, ctx: TRITON_ROWS)
    patch(experts, "load_product", product_of_a_gpu)
    patch(tiles, "has_tma", lambda x: True)
