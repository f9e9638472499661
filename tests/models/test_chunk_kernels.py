"""Triton kernels of whole sequences of the gated delta rule and of Kimi delta attention: in Triton's interpreter
against a formula in fp64, compiled for Hopper, and refused where they do not serve."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from tests.core.nn.kernels.interpreter import run_interpreted
from torch import Tensor

from mt_core.errors import ConfigError
from mt_models.blocks.delta_backends import GATED, KIMI, RuleSizes, build_rules
from mt_models.blocks.gated_delta_rule import DeltaInputs


class Case(NamedTuple):
    length: int
    groups: int
    heads: int
    dim: int
    value: int
    size: int = 64
    documents: tuple[int, ...] = ()
    """Where the second and later ones begin."""
    has_state: bool = False
    dtype: torch.dtype = torch.float32
    rows: int = 1


CASES = {
    "two chunks, the second of 6 positions": Case(70, 1, 1, 16, 32),
    "odd sizes, shared keys": Case(37, 1, 2, 20, 33, 32, has_state=True, rows=2),
    "documents in and at the end of chunks": Case(90, 1, 1, 16, 16, 32, (3, 32, 33, 89)),
    "documents after a state": Case(40, 1, 1, 16, 16, 32, (35,), has_state=True),
    "fewer positions than a chunk": Case(5, 2, 2, 64, 64, 32, rows=2),
    "128 channels in bf16": Case(100, 1, 1, 128, 128, documents=(50,), has_state=True, dtype=torch.bfloat16),
    "64 channels in bf16": Case(70, 1, 1, 64, 96, 32, has_state=True, dtype=torch.bfloat16),
}
LARGEST = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
"""Error, as a part of the largest number of each result. The products of bf16 have 8 bits, of truncated numbers in the
interpreter."""


RULES = ("gated", "kimi")
OF_CHANNELS = ("odd sizes, shared keys", "documents in and at the end of chunks", "128 channels in bf16")
"""Cases of Kimi delta attention, whose other kernels are those of the gated rule"""


class Drawn(NamedTuple):
    inputs: DeltaInputs
    state: Tensor | None
    documents: Tensor | None
    gradients: tuple[Tensor, Tensor]
    """Of outputs and of the last state."""


def draw(case: Case, by_channel: bool = False) -> Drawn:
    """Queries, keys and values side by side in one tensor, as a projection leaves them. by_channel: so are decays."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, keys, values = case.rows, case.groups * case.dim, case.heads * case.value
    mixed = normal(rows, case.length, 2 * keys + values).to(case.dtype)
    q, k, v = mixed.split((keys, keys, values), -1)
    q, k, v = q.unflatten(-1, (-1, case.dim)), k.unflatten(-1, (-1, case.dim)), v.unflatten(-1, (-1, case.value))
    g = -0.3 * normal(rows, case.length, case.heads, *([case.dim] if by_channel else [])).exp()
    beta = normal(rows, case.length, case.heads).sigmoid().to(case.dtype)
    state = normal(rows, case.heads, case.dim, case.value)
    begins = torch.tensor(case.documents)
    documents = torch.bucketize(torch.arange(case.length), begins, right=True).expand(rows, -1)
    return Drawn(
        DeltaInputs(q, k, v, g, beta),
        state if case.has_state else None,
        documents if case.documents else None,
        (normal(*v.shape), normal(*state.shape)),
    )


def formula(x: DeltaInputs, state: Tensor | None, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """One position after the other in fp64."""
    q, k, v, g, beta = x
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    repeats = v.shape[2] // k.shape[2]
    q, k = (y.repeat_interleave(repeats, 2) for y in (q, k))
    s = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1]) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        if documents is not None and t:
            s = s * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        s = s * (g[:, t, :, None, None] if g.dim() == 3 else g[:, t, ..., None]).exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhd,bhdv->bhv", k[:, t], s))
        s = s + k[:, t, :, :, None] * u[:, :, None]
        outputs.append(torch.einsum("bhd,bhdv->bhv", q[:, t], s) / k.shape[-1] ** 0.5)
    return torch.stack(outputs, 1), s


NAMES = ("o", "last", "dq", "dk", "dv", "dg", "dbeta", "dstate")


def results(rule: Any, drawn: Drawn, dtype: torch.dtype | None) -> list[Tensor]:
    """Outputs and gradients; dtype: of all inputs, in place of their own."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (*drawn.inputs, drawn.state) if x is not None]
    state = leaves[5] if drawn.state is not None else None
    o, last = rule(DeltaInputs(*leaves[:5]), state, drawn.documents)
    do, dlast = (x.to(y.dtype) for x, y in zip(drawn.gradients, (o, last), strict=True))
    return [o, last, *torch.autograd.grad((o, last), leaves, (do, dlast))]


def errors_of_rules(rank: int, world: int, kind: str) -> dict[str, dict[str, float]]:
    recurrence = {"gated": GATED, "kimi": KIMI}[kind]
    errors = {}
    for name, case in CASES.items():
        if kind == "kimi" and name not in OF_CHANNELS:
            continue

        def rule(x: DeltaInputs, state: Tensor | None, ids: Tensor | None, size: int = case.size) -> Any:
            return recurrence.triton(x, chunk_size=size, state=state, segment_ids=ids)

        drawn = draw(case) if kind == "gated" else draw(case._replace(groups=case.heads), by_channel=True)
        both = zip(results(rule, drawn, None), results(formula, drawn, torch.float64), strict=True)
        errors[name] = {n: float((x - y).abs().max() / y.abs().max()) for n, (x, y) in zip(NAMES, both, strict=False)}
    return errors


@pytest.mark.long
@pytest.mark.parametrize("kind", RULES)
def test_kernels_compute_the_formula_and_its_gradients(kind: str) -> None:
    (errors,) = run_interpreted(errors_of_rules, kind)
    assert set(errors) == set(CASES if kind == "gated" else OF_CHANNELS)
    for name, found in errors.items():
        limit = LARGEST[CASES[name].dtype]
        assert {n: error for n, error in found.items() if not error < limit} == {}, name


# -- compiled ------------------------------------------------------------------------------------------


def whole_rule(dim: int, value: int, size: int) -> None:
    from mt_models.blocks.triton_kernels.gated_delta_rule import triton_gated_delta_rule

    half = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.empty(2, 4096, heads, width, **half) for heads, width in ((16, dim), (16, dim), (32, value)))
    g, beta = torch.empty(2, 4096, 32, device="meta", requires_grad=True), torch.empty(2, 4096, 32, **half)
    state = torch.empty(2, 32, dim, value, device="meta")
    documents = torch.empty(2, 4096, device="meta", dtype=torch.int64)
    inputs = DeltaInputs(q, k, v, g, beta)
    o, last = triton_gated_delta_rule(inputs, chunk_size=size, state=state, segment_ids=documents)
    torch.autograd.grad((o, last), tuple(inputs), (torch.empty_like(o), torch.empty_like(last)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("dim", "value", "size"), [(128, 128, 64), pytest.param(96, 192, 32, marks=pytest.mark.exhaustive)]
)
def test_kernels_compile_for_hopper_without_spills(dim, value, size, tmp_path, monkeypatch) -> None:
    """As they are launched for heads of Qwen3-Next, and of OLMo hybrids. 232,448: bytes of shared memory that a program
    can have on an H100."""
    pytest.importorskip("triton")
    from tests.core.nn.kernels.recorded_launches import compiled, launches_of

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = launches_of(lambda: whole_rule(dim, value, size), monkeypatch.setattr)
    assert len(launches) == 4 + 7  # backward computes parts and states again
    for kernel in {compiled(launch, tmp_path) for launch in launches}:
        assert kernel.stack == 0, kernel.name
        assert kernel.shared <= 232_448, kernel.name
        # 64 rows are what wgmma multiplies.
        assert size < 64 or "wgmma.mma_async" in kernel.ptx, kernel.name


def whole_kimi_rule() -> None:
    from mt_models.blocks.triton_kernels.kimi_delta_rule import triton_kimi_rule

    half = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v, g = (torch.empty(2, 4096, 32, 128, **half) for _ in range(4))
    inputs = DeltaInputs(q, k, v, g.float(), torch.empty(2, 4096, 32, **half))
    o, last = triton_kimi_rule(inputs, chunk_size=64)
    torch.autograd.grad((o, last), tuple(inputs), (torch.empty_like(o), torch.empty_like(last)))


@pytest.mark.long
def test_products_decayed_by_channel_compile_for_hopper_without_spills(tmp_path, monkeypatch) -> None:
    """The kernels that Kimi delta attention does not have in common with the gated rule, with heads of Kimi Linear."""
    pytest.importorskip("triton")
    from tests.core.nn.kernels.recorded_launches import compiled, launches_of

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = launches_of(whole_kimi_rule, monkeypatch.setattr)
    assert len(launches) == 4 + 6  # backward computes states again
    own = [launch for launch in launches if "_of_chunks" not in launch.kernel.__name__]
    for kernel in (compiled(launch, tmp_path) for launch in own):
        assert kernel.stack == 0, kernel.name
        assert "wgmma.mma_async" in kernel.ptx, kernel.name
    assert len(own) == 4


# -- the choice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "chunk_size", "message"),
    [
        (RuleSizes("cpu", torch.bfloat16, 64, 64), 64, "its kernels run on a CUDA device; set train.device"),
        (RuleSizes("cuda", torch.float32, 64, 64), 64, "its kernels compute in bf16, .*; set precision.dtype=bf16"),
        (RuleSizes("cuda", torch.bfloat16, 256, 64), 64, "at most 128 channels; change model.linear_key_head_dim"),
        (RuleSizes("cuda", torch.bfloat16, 64, 64), 128, "32 or 64 positions; change model.linear_chunk_size"),
    ],
)
def test_kernels_that_do_not_serve_are_refused(sizes, chunk_size, message) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match=f'linear_attention_backend="triton" cannot serve .*{message}'):
        build_rules(GATED, "triton", chunk_size, sizes)


def test_named_kernels_compute_and_auto_leaves_training_to_torch() -> None:
    """Until they have trained on a GPU."""
    pytest.importorskip("triton")
    sizes = RuleSizes("cuda", torch.bfloat16, 128, 128)
    assert build_rules(GATED, "triton", 64, sizes)[2:] == ("triton", "triton")
    assert build_rules(GATED, "auto", 64, sizes).whole_by != "triton"
