"""On a GPU: our kernels against formulas in fp64 at the sizes of models, and what only a GPU shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tests.core.nn.kernels import test_row_kernels as formulas
from tests.core.nn.kernels.comparison import assert_agrees
from tests.core.nn.kernels.interpreter import fused, implementation
from tests.core.nn.kernels.test_adamw import check_forms, lists, main_weights, moved
from tests.core.nn.kernels.test_losses import losses_of
from torch import Tensor

from mt_core.nn.attention import AttentionPattern, eager_attention
from mt_core.nn.embedding import VocabRange, project_to_vocab
from mt_core.nn.kernels.reference.adamw import AdamWOptions, TorchAdamW
from mt_core.parallel.context import Axis, ParallelContext

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype).requires_grad_()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any synchronization with the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(513, 4096), (7, 16384), (3, 32768), (1000, 3, 128), (5, 37)])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms(dtype: torch.dtype, shape: tuple[int, ...], zero_centered: bool) -> None:
    x, weight, bias = (on_gpu(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape[-1:], shape[-1:])))
    assert_agrees(implementation("rms_norm", "triton"), formulas.rms_norm, x, weight, 1e-5, zero_centered)
    assert_agrees(implementation("layer_norm", "triton"), formulas.layer_norm, x, weight, bias, 1e-5, zero_centered)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(513, 4096), (7, 16384), (3, 32768), (5, 37)])
def test_norms_with_a_residual_stream(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    shapes = (shape, shape, shape[-1:], shape[-1:])
    x, branch, weight, bias = (on_gpu(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes))
    for addend in (branch, None):
        assert_agrees(fused("rms_norm"), formulas.add_rms_norm, x, addend, weight, 1e-5, False)
        assert_agrees(fused("layer_norm"), formulas.add_layer_norm, x, addend, weight, bias, 1e-5, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "groups", "head_dim", "half"), [(32, 8, 128, 64), (12, 12, 64, 16), (3, 1, 10, 3)])
def test_rotary(dtype: torch.dtype, interleaved: bool, heads: int, groups: int, head_dim: int, half: int) -> None:
    q, k = on_gpu(2, 129, heads, head_dim, dtype=dtype), on_gpu(2, 129, groups, head_dim, dtype=dtype)
    angles = on_gpu(1, 129, 1, half, dtype=torch.float32).detach()
    assert_agrees(implementation("rotary", "triton"), formulas.rotary, q, k, angles.cos(), angles.sin(), interleaved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("per_group", "groups", "head_dim", "half"), [(4, 8, 128, 64), (1, 12, 64, 16), (3, 1, 10, 3)])
def test_rotary_of_qkv(
    dtype: torch.dtype, interleaved: bool, per_group: int, groups: int, head_dim: int, half: int
) -> None:
    qkv = on_gpu(2, 129, groups, per_group + 2, head_dim, dtype=dtype)
    angles = on_gpu(1, 129, 1, half, dtype=torch.float32).detach()
    assert_agrees(fused("rotary"), formulas.turned_parts, qkv, angles.cos(), angles.sin(), interleaved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("per_group", "groups", "head_dim", "half"), [(4, 8, 128, 64), (1, 12, 64, 16), (3, 1, 10, 3)])
def test_normed_rotary_of_qkv(
    dtype: torch.dtype, interleaved: bool, per_group: int, groups: int, head_dim: int, half: int
) -> None:
    qkv = on_gpu(2, 600, groups, per_group + 2, head_dim, dtype=dtype)  # more tokens than programs
    weights = [on_gpu(head_dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    angles = on_gpu(1, 600, 1, half, dtype=torch.float32).detach()
    given = qkv, angles.cos(), angles.sin(), interleaved, *weights, 1e-5, interleaved
    assert_agrees(formulas.normed_in_one_pass, formulas.normed_parts, *given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "squared_relu"])
@pytest.mark.parametrize("width", [14336, 26])
def test_activations(dtype: torch.dtype, name: str, width: int) -> None:
    x = on_gpu(65, 2 * width, dtype=dtype)
    for bias in (None, on_gpu(2 * width, dtype=dtype)):
        assert_agrees(implementation("activation", "triton"), formulas.activation, x, bias, name)


def test_dropout_and_its_gradient() -> None:
    x = torch.ones(512, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = implementation("bias_dropout_add", "triton")(x, None, torch.zeros_like(x), 0.25)
    assert abs((out > 0).double().mean().item() - 0.75) < 2e-3  # four standard deviations: 1.2e-3
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad > 0, out > 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 64, 1024), (1, 2, 5, 37)])
def test_softmax(dtype: torch.dtype, causal: bool, shape: tuple[int, int, int, int]) -> None:
    scores = on_gpu(*shape, dtype=dtype)
    mask = torch.rand(shape[0], 1, 1, shape[3], device="cuda") > 0.3
    for given in (None, mask):
        assert_agrees(implementation("softmax", "triton"), formulas.softmax, scores, 0.5, given, causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [50257, 4096])
def test_cross_entropy(dtype: torch.dtype, vocabulary: int) -> None:
    logits, columns = on_gpu(33, vocabulary, dtype=dtype), torch.randint(0, vocabulary, (33,), device="cuda")
    kernel = implementation("cross_entropy", "triton")
    for overwrite in (False, True):
        assert_agrees(lambda x, o=overwrite: kernel(x * 1, columns, Axis(), o), lambda x: losses_of(x, columns), logits)


def test_logits_of_a_padded_vocabulary_are_aligned() -> None:
    """GPT-2's: the product's rows, and those of the gradient, begin at multiples of 16 bytes."""
    ids, padded = 50257, 50304
    # Logits of deviation 1: the larger they are, the more of a probability do the last places of bf16 change.
    x, weight = on_gpu(1, 64, 256), (on_gpu(padded, 256).detach() / 16).requires_grad_()
    target = torch.randint(0, ids, (64,), device="cuda")
    logits = project_to_vocab(x, weight, VocabRange(0, ids), ParallelContext())
    assert logits.shape[-1] == ids
    assert logits.stride(1) == padded
    implementation("cross_entropy", "triton")(logits.flatten(0, 1), target, Axis()).sum().backward()
    exact = [given.detach().double().requires_grad_() for given in (x, weight)]
    losses_of(exact[0][0] @ exact[1][:ids].T, target).sum().backward()
    for given, wanted in zip((x, weight), exact, strict=True):
        assert given.grad is not None
        assert (given.grad.double() - wanted.grad).abs().max() < 1.6e-2 * wanted.grad.abs().max()
    assert not weight.grad[ids:].any()  # type: ignore[index]


def test_linear_cross_entropy_holds_a_chunk_of_logits_and_no_more() -> None:
    tokens, hidden, vocabulary = 4096, 1024, 64000
    x, weight = on_gpu(tokens, hidden), on_gpu(vocabulary, hidden)
    columns = torch.randint(0, vocabulary, (tokens,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total, losses = implementation("linear_cross_entropy_sum", "triton")(
        x, weight, columns, torch.full((tokens,), 1 / tokens, device="cuda"), Axis(), 512
    )
    total.backward()
    gradients = 2 * (x.numel() + weight.numel())
    chunk = 2 * 512 * vocabulary
    assert torch.cuda.max_memory_allocated() - before < gradients + 1.5 * chunk
    wanted = torch.nn.functional.cross_entropy((x.detach() @ weight.detach().T).float(), columns, reduction="none")
    assert torch.allclose(losses, wanted, atol=2e-2)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", [((4096, 64), (256,)), ((7, 5), (3000,), (0,), (1,))])
def test_adamw(halves: bool, moment: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> None:
    weight = torch.bfloat16 if halves else torch.float32
    one, other = (moved(lists(weight, moment, torch.bfloat16, shapes), "cuda") for _ in range(2))
    options, scale = AdamWOptions(1e-2, 0.9, 0.95, 1e-8, 0.1), torch.full((), 0.5, device="cuda")
    engine = implementation("adamw", "triton")()
    for step in range(3):
        with no_waiting() if step else nullcontext():  # the first step makes the table of addresses
            engine.step(one, options, scale)
        TorchAdamW().step(other, options, scale)
    for kind in ("moments1", "moments2"):
        for a, b in zip(getattr(one, kind), getattr(other, kind), strict=True):
            # a fused multiply-add may move a number across what the random bits decide by: one bf16 place
            assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-7)
    tolerance = 2e-6 if moment == torch.float32 else 1e-3
    for a, b in zip(main_weights(one), main_weights(other), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance / 10)


def test_copies_and_remainders_train_the_same_bits() -> None:
    check_forms(0, 1, "triton", "cuda")


def test_no_kernel_waits_for_the_device() -> None:
    x, weight, columns = on_gpu(256, 512), on_gpu(512), torch.randint(0, 512, (256,), device="cuda")
    q, k, cos = on_gpu(1, 8, 4, 64), on_gpu(1, 8, 2, 64), torch.ones(1, 8, 1, 32, device="cuda")
    calls: dict[str, Any] = {
        "rms_norm": lambda f: f(x, weight, 1e-5),
        "layer_norm": lambda f: f(x, weight, weight, 1e-5),
        "rotary": lambda f: f(q, k, cos, cos)[0],
        "activation": lambda f: f(x, None, "swiglu"),
        "bias_dropout_add": lambda f: f(x, weight, x, 0.1),
        "softmax": lambda f: f(x[None, None], 1.0, None, True),
        "cross_entropy": lambda f: f(x * 1, columns, Axis(), True),
        "linear_cross_entropy": lambda f: f(x, x, columns.clamp(max=255), Axis(), 64),
        "causal_conv": lambda f: f(x[None], x.detach()[:4].t().contiguous(), weight, None, True),
    }
    for guard in (nullcontext(), no_waiting()):  # compiled in the first round
        with guard:
            for name, call in calls.items():
                call(implementation(name, "triton")).sum().backward()  # type: ignore[arg-type]


# -- attention -------------------------------------------------------------------------------------

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)


def attention_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return on_gpu(2, 256, 8, 64), on_gpu(2, 256, 2, 64, seed=1), on_gpu(2, 256, 2, 64, seed=2)


def documents() -> Tensor:
    ids = torch.zeros(2, 256, dtype=torch.int64, device="cuda")
    ids[0, 100:], ids[1, 3:200], ids[1, 200:] = 1, 1, 2
    return ids


def assert_same_attention(core: Any, pattern: AttentionPattern) -> None:
    assert_agrees(
        lambda q, k, v: core(q, k, v, pattern, 0.0),
        lambda q, k, v: eager_attention(softmax_in_fp32=False)(q, k, v, pattern, 0.0),
        *attention_inputs(),
    )


@HOPPER
@pytest.mark.parametrize("packed", [False, True])
def test_cudnn(packed: bool) -> None:
    from mt_core.nn.attention_backends.cudnn import CudnnAttention

    assert_same_attention(CudnnAttention(), AttentionPattern(segment_ids=documents() if packed else None))


@HOPPER
def test_cudnn_is_the_kernel_that_runs() -> None:
    from mt_core.nn.attention_backends.cudnn import CudnnAttention

    q, k, v = attention_inputs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        CudnnAttention()(q, k, v, AttentionPattern(), 0.0)
        torch.cuda.synchronize()
    names = " ".join(event.key.lower() for event in profile.key_averages())
    assert "cudnn" in names, names


@pytest.mark.parametrize("kind", ["causal", "documents", "window", "alibi", "full"])
def test_flex(kind: str) -> None:
    from tests.core.nn.kernels.test_attention_backends import request

    from mt_core.nn.attention_backends.flex import build_flex

    pattern = {
        "causal": AttentionPattern(),
        "full": AttentionPattern(causal=False),
        "documents": AttentionPattern(segment_ids=documents()),
        "window": AttentionPattern(window=40),
        "alibi": AttentionPattern(alibi_slopes=torch.linspace(0, 0.5, 8, device="cuda")),
    }[kind]
    assert_same_attention(build_flex(request(head_dim=64)), pattern)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_flash(version: int, packed: bool) -> None:
    from tests.core.nn.kernels.test_attention_backends import request

    from mt_core.nn.attention_backends import flash

    asked = request(head_dim=64)
    answer = (flash.supports_flash_2 if version == 2 else flash.supports_flash_3)(asked)
    if answer is not True:
        pytest.skip(str(answer))
    build = flash.build_flash_2 if version == 2 else flash.build_flash_3
    assert_same_attention(build(asked), AttentionPattern(segment_ids=documents() if packed else None))


# -- other packages --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["te", "apex", "liger"])
def test_other_packages(name: str) -> None:
    """Those that are installed compute what ours do."""
    from mt_core.nn.kernels.choice import able
    from mt_core.nn.kernels.request import KernelRequest

    request = KernelRequest(device_type="cuda", dtype="bfloat16")
    x, weight, bias = on_gpu(65, 512), on_gpu(512), on_gpu(512, seed=3)
    q, k = on_gpu(2, 16, 4, 64), on_gpu(2, 16, 2, 64)
    angles = on_gpu(1, 16, 1, 32, dtype=torch.float32).detach()
    columns = torch.randint(0, 512, (65,), device="cuda")
    checks: dict[str, Any] = {
        "rms_norm": (formulas.rms_norm, (x, weight, 1e-5, False)),
        "layer_norm": (formulas.layer_norm, (x, weight, bias, 1e-5, False)),
        "rotary": (formulas.rotary, (q, k, angles.cos(), angles.sin(), False)),
        "activation": (formulas.activation, (x, None, "swiglu")),
        "cross_entropy": (lambda y, c, axis: losses_of(y, c), (x, columns, Axis())),
    }
    served = [kernel for kernel in checks if name in able(kernel, request)]  # type: ignore[arg-type]
    if not served:
        pytest.skip(f"{name} is not installed")
    for kernel in served:
        formula, args = checks[kernel]
        assert_agrees(implementation(kernel, name), formula, *args)  # type: ignore[arg-type]
