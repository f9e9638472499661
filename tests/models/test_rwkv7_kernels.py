"""Triton kernels of the recurrence of RWKV-7: in Triton's interpreter against a formula in fp64, compiled for Hopper,
chosen by hand and refused where they do not serve."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from tests.core.nn.kernels.interpreter import run_interpreted
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.delta_backends import RWKV7, RuleSizes, build_rules
from mt_models.blocks.rwkv7_rule import LOWEST_DECAY, Rwkv7Inputs
from mt_models.rwkv7.config import Rwkv7Config
from mt_models.rwkv7.time_mixing import Rwkv7Scan


class Case(NamedTuple):
    length: int
    heads: int
    dim: int
    value: int
    documents: tuple[int, ...] = ()
    """Where the second and later ones begin."""
    has_state: bool = False
    dtype: torch.dtype = torch.float32
    rows: int = 1
    has_last: bool = True
    """Whether the last state has a gradient."""


CASES = {
    "one position": Case(1, 2, 16, 16, has_state=True),
    "whole blocks of positions": Case(64, 1, 16, 16),
    "odd sizes": Case(37, 2, 20, 33, has_state=True, rows=2),
    "documents in and at the end of blocks": Case(70, 1, 16, 16, (3, 32, 33, 69), rows=2, has_last=False),
    "documents after a state": Case(40, 1, 16, 16, (35,), has_state=True),
    "blocks of value channels in bf16": Case(35, 1, 128, 72, (34,), has_state=True, dtype=torch.bfloat16),
    "64 channels in bf16": Case(35, 2, 64, 64, has_state=True, dtype=torch.bfloat16),
}
LARGEST = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Error, as a part of the largest number of a result in a dtype: all is computed in fp32, and the interpreter truncates
results in bf16 to 8 bits."""
NAMES = ("o", "last", "dr", "dw", "dk", "dv", "dz", "da", "dstate")


class Drawn(NamedTuple):
    inputs: Rwkv7Inputs
    state: Tensor | None
    documents: Tensor | None
    gradients: tuple[Tensor, Tensor]
    """Of outputs and of the last state."""


def draw(case: Case) -> Drawn:
    """Reads and keys side by side in one tensor, so that they are not contiguous."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    positions = (case.rows, case.length, case.heads)
    r, k = normal(*positions, 2 * case.dim).to(case.dtype).split(case.dim, -1)
    w = LOWEST_DECAY * (2 * normal(*positions, case.dim)).sigmoid()
    v = normal(*positions, case.value).to(case.dtype)
    z = torch.nn.functional.normalize(normal(*positions, case.dim), dim=-1).to(case.dtype)
    a = normal(*positions, case.dim).sigmoid().to(case.dtype)
    state = normal(case.rows, case.heads, case.dim, case.value)
    begins = torch.tensor(case.documents)
    documents = torch.bucketize(torch.arange(case.length), begins, right=True).repeat(case.rows, 1)
    if case.rows > 1:
        # Rows have documents of their own.
        documents[1] = torch.arange(case.length) >= 50
    return Drawn(
        Rwkv7Inputs(r, w, k, v, z, a),
        state if case.has_state else None,
        documents if case.documents else None,
        (normal(*v.shape).to(case.dtype), normal(*state.shape)),
    )


def formula(x: Rwkv7Inputs, state: Tensor | None, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """S (diag(w) - (z a) z^T) + k v^T with transitions as matrices [D, D], one position after the other in fp64."""
    r, w, k, v, z, a = x
    s = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        if documents is not None and t:
            s = s * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        transition = torch.diag_embed(w[:, t].exp()) - torch.einsum("bhd,bhe->bhde", z[:, t] * a[:, t], z[:, t])
        s = transition @ s + torch.einsum("bhd,bhv->bhdv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhd,bhdv->bhv", r[:, t], s))
    return torch.stack(outputs, 1), s


def results(rule: Any, drawn: Drawn, dtype: torch.dtype | None, has_last: bool) -> list[Tensor]:
    """Outputs and gradients; dtype: of all inputs, in place of their own."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (*drawn.inputs, drawn.state) if x is not None]
    state = leaves[6] if drawn.state is not None else None
    o, last = rule(Rwkv7Inputs(*leaves[:6]), state, drawn.documents)
    do, dlast = (x.to(y.dtype) for x, y in zip(drawn.gradients, (o, last), strict=True))
    ends = ((o, last), (do, dlast)) if has_last else ((o,), (do,))
    return [o, last, *torch.autograd.grad(ends[0], leaves, ends[1])]


def part(x: Tensor, exact: Tensor) -> float:
    """Error as a part of the largest that x may have."""
    difference = (x.detach() - exact.detach()).abs().max() / exact.detach().abs().max()
    return float(difference) / LARGEST[x.dtype]


def errors_of_rule(rank: int, world: int) -> dict[str, dict[str, float]]:
    def rule(x: Rwkv7Inputs, state: Tensor | None, documents: Tensor | None) -> Any:
        return RWKV7.triton(x, chunk_size=32, state=state, segment_ids=documents)

    errors = {}
    for name, case in CASES.items():
        drawn = draw(case)
        exact = results(formula, drawn, torch.float64, case.has_last)
        both = zip(results(rule, drawn, None, case.has_last), exact, strict=True)
        errors[name] = {n: part(x, y) for n, (x, y) in zip(NAMES, both, strict=False)}
        step = RWKV7.triton_step(drawn.inputs, state=drawn.state, segment_ids=drawn.documents)
        errors[name] |= {f"{n} without gradients": part(x, y) for n, x, y in zip(NAMES, step, exact, strict=False)}
    return errors


def test_kernels_compute_the_formula_and_its_gradients() -> None:
    (errors,) = run_interpreted(errors_of_rule)
    assert set(errors) == set(CASES)
    for name, by_result in errors.items():
        assert {n: error for n, error in by_result.items() if not error < 1} == {}, name


def layer_of_a_run(rank: int, world: int) -> tuple[str, float]:
    """What the layer of a configuration notes, and how far it is from the formula."""
    sizes: Any = {"num_layers": 1, "hidden_size": 32, "head_size": 16}
    config = Rwkv7Config(family="rwkv7", linear_attention_backend="triton", **sizes)
    scan = Rwkv7Scan(config, ParallelContext(torch.device("cpu"), torch.bfloat16))
    drawn = draw(Case(5, 2, 16, 16))
    return scan.rules.whole_by, part(scan(drawn.inputs, None, None), formula(*drawn[:3])[0])


def test_a_layer_takes_the_kernels_that_its_key_names() -> None:
    ((name, error),) = run_interpreted(layer_of_a_run)
    assert name == "triton"
    assert error < 1


# -- compiled ------------------------------------------------------------------------------------------


def whole_rule(dim: int) -> None:
    from mt_models.blocks.triton_kernels.rwkv7_rule import triton_rwkv7_rule

    shape = (2, 4096, 32, dim)
    r, k, v, z, a = (torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(5))
    inputs = Rwkv7Inputs(r, torch.empty(shape, device="meta", requires_grad=True), k, v, z, a)
    state = torch.empty(2, 32, dim, dim, device="meta")
    documents = torch.empty(2, 4096, device="meta", dtype=torch.int64)
    o, last = triton_rwkv7_rule(inputs, state=state, segment_ids=documents)
    torch.autograd.grad((o, last), tuple(inputs), (torch.empty_like(o), torch.empty_like(last)))
    with torch.no_grad():
        triton_rwkv7_rule(Rwkv7Inputs(*(x[:, :1] for x in inputs)), state=state)


@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_compile_for_hopper_without_spills(dim, tmp_path, monkeypatch) -> None:
    """As they are launched for heads of the published models, and for the widest; the last is a step of decoding."""
    pytest.importorskip("triton")
    from tests.core.nn.kernels.recorded_launches import compiled, launches_of

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = launches_of(lambda: whole_rule(dim), monkeypatch.setattr)
    assert len(launches) == 3
    for kernel in (compiled(launch, tmp_path) for launch in launches):
        assert kernel.stack == 0, kernel.name


# -- the choice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (RuleSizes("cpu", torch.bfloat16, 64, 64), "its kernels run on a CUDA device; set train.device"),
        (RuleSizes("cuda", torch.float32, 64, 64), "its kernels compute in bf16, .*; set precision.dtype=bf16"),
        (RuleSizes("cuda", torch.bfloat16, 256, 256), "at most 128 channels; change model.head_size"),
    ],
)
def test_kernels_that_do_not_serve_are_refused(sizes, message) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match=f'linear_attention_backend="triton" cannot serve .*{message}'):
        build_rules(RWKV7, "triton", 32, sizes)


def test_named_kernels_compute_and_auto_leaves_all_to_torch(monkeypatch) -> None:
    """Until they have run on a GPU. The size of a chunk is not the kernels': all are taken."""
    pytest.importorskip("triton")
    monkeypatch.setattr("mt_models.blocks.delta_backends.has_triton", lambda: True)
    monkeypatch.setattr("mt_models.blocks.delta_backends.can_run_fla", lambda module: False)
    sizes = RuleSizes("cuda", torch.bfloat16, 64, 64)
    assert build_rules(RWKV7, "triton", 16, sizes)[2:] == ("triton", "triton")
    assert build_rules(RWKV7, "auto", 16, sizes)[2:] == ("torch", "torch")
