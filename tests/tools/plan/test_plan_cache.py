"""What a planner remembers changes no number: results of operations, and runs that layouts have in common."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cases import EP, ETP, MOE, TP, built, plan_alone, tree
from fake import host

from mt_tools.plan.layouts import Planner
from mt_tools.plan.machines import get_machine
from mt_tools.plan.result_cache import ResultCache
from mt_tools.plan.stages import StageCosts

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def form(out: Any) -> Any:
    """What a tensor is, its memory included."""
    if isinstance(out, torch.Tensor):
        return out.shape, out.stride(), out.dtype, out.device, out.untyped_storage().nbytes()
    return type(out), [form(one) for one in out]


OPERATIONS = {
    "transposed": (aten.mul.Tensor, (meta(3, 4).T, meta(4, 3)), {}),
    "broadcast": (aten.add.Tensor, (meta(3, 1), meta(4, dtype=torch.float32)), {}),
    "a whole number": (aten.mul.Tensor, (meta(3, dtype=torch.int64), 2), {}),
    "a number": (aten.mul.Tensor, (meta(3, dtype=torch.int64), 2.0), {}),
    "a truth value": (aten.mul.Tensor, (meta(3, dtype=torch.bool), True), {}),
    "a list of tensors": (aten.cat.default, ([meta(2, 3), meta(5, 3)],), {}),
    "a dtype": (aten._to_copy.default, (meta(2, 3),), {"dtype": torch.float64}),
    "several results": (aten.topk.default, (meta(4, 9), 3), {}),
    "a result of several parts": (aten.unsafe_split.Tensor, (meta(6, 2), 2), {}),
    "a view": (aten.view.default, (meta(6, 2), [3, 4]), {}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_cached_result_is_what_torch_gives(name) -> None:
    func, args, options = OPERATIONS[name]
    cache = ResultCache()
    # Arguments that are equal in Python and mean another result.
    for other in OPERATIONS.values():
        cache(*other)
    first, second = (cache(func, args, options) for _ in range(2))
    assert form(first) == form(second) == form(func(*args, **options))


def test_torch_is_called_once_for_new_tensors_and_every_time_for_others() -> None:
    calls: list[object] = []

    class Counted:
        """An operation that is counted."""

        def __init__(self, func: Any) -> None:
            self.func, self._schema, self.namespace = func, func._schema, func.namespace

        def __call__(self, *args: Any, **options: Any) -> Any:
            calls.append(self)
            return self.func(*args, **options)

    cache, x = ResultCache(), meta(4, 6)
    asked = {"mul": Counted(aten.mul.Tensor), "view": Counted(aten.view.default), "add_": Counted(aten.add_.Tensor)}
    split = Counted(aten.unsafe_split.Tensor)  # its parts share memory, which its schema does not say
    for _ in range(3):
        product = cache(asked["mul"], (x, x), {})
        assert cache(asked["view"], (x, [24]), {}).untyped_storage()._cdata == x.untyped_storage()._cdata
        assert cache(asked["add_"], (x, 1), {}) is x
        first, second = cache(split, (x, 2), {})
        assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert product.untyped_storage()._cdata != cache(asked["mul"], (x, x), {}).untyped_storage()._cdata
    assert [calls.count(one) for one in (*asked.values(), split)] == [1, 3, 3, 3]


def test_results_with_values_are_computed() -> None:
    cache = ResultCache()
    for number in (1, 2):
        assert cache(aten.mul.Tensor, (torch.tensor([3]), torch.tensor([number])), {}).item() == 3 * number


LAYERS = {**MOE, "moe": {**MOE["moe"], "num_experts": 4, "moe_layer_freq": "([0]*2+[1]*2)"}}


@pytest.mark.long
@pytest.mark.slow
def test_layouts_planned_one_after_another_are_as_if_planned_alone() -> None:
    layouts = [{}, {EP: 2}, {EP: 4}, {TP: 2}, {TP: 2, EP: 2, ETP: 1}, {EP: 2, "context_parallel_size": 2}]
    trees = [tree(LAYERS, parallel=parallel) for parallel in layouts]
    planner = Planner(built(trees[0], 4), host(), get_machine("h100"))
    for values in trees:
        assert planner.plan(built(values, 4), 4).ranks == plan_alone(values, 4).ranks


@pytest.mark.slow
def test_layers_without_experts_are_run_once_however_experts_are_sharded(monkeypatch) -> None:
    ran: list[tuple[int, ...]] = []
    run = StageCosts._run

    def noted(self: StageCosts, stage: Any, hidden: Any) -> Any:
        ran.append(tuple(stage.layers))
        return run(self, stage, hidden)

    monkeypatch.setattr(StageCosts, "_run", noted)
    planner = Planner(built(tree(LAYERS), 4), host(), get_machine("h100"))
    _ = planner.flops_per_token
    ran.clear()
    for size in (1, 2, 4):
        planner.plan(built(tree(LAYERS, parallel={EP: size}), 4), 4)
    # Balanced and imbalanced, of each division.
    assert [ran.count(layers) for layers in ((0,), (0, 1), (1, 2), (2, 3))] == [1, 1, 6, 6]
