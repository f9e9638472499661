"""The LM head of a vocabulary with rows of padding: what is multiplied, and that nothing of the padding is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mt_core.nn.embedding import VocabRange, padded_vocab_size, project_to_vocab
from mt_core.nn.kernels.reference.cross_entropy import cross_entropy
from mt_core.parallel.context import Axis, ParallelContext

ROWS, HIDDEN, IDS = 2, 8, 50257
PADDED = padded_vocab_size(IDS, 128)


class Products(TorchDispatchMode):
    """Shapes of the operands of matrix products, and operators of all else that makes tensors as large as logits."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[list[tuple[int, ...]]] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::mm":
            self.operands.append([tuple(operand.shape) for operand in args])
        elif isinstance(result, Tensor) and not func.is_view and result.numel() >= ROWS * IDS:
            self.others.append(func._schema.name)
        return result


def test_the_product_has_columns_of_padding_and_logits_are_its_first_ones() -> None:
    x, weight = (
        torch.zeros(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((1, ROWS, HIDDEN), (PADDED, HIDDEN))
    )
    with Products() as seen:
        logits = project_to_vocab(x, weight, VocabRange(0, IDS), ParallelContext())
    assert seen.operands == [[(ROWS, HIDDEN), (HIDDEN, PADDED)]]
    assert logits.shape == (1, ROWS, IDS)
    assert logits.stride() == (ROWS * PADDED, PADDED, 1)
    assert PADDED * logits.itemsize % 16 == 0
    gradient = torch.zeros(1, ROWS, PADDED, dtype=torch.bfloat16)[..., :IDS]
    with Products() as seen:
        logits.backward(gradient)
    # No gradient of all columns, which would be a copy with zeros.
    assert seen.operands == [[(ROWS, IDS), (IDS, HIDDEN)], [(IDS, ROWS), (ROWS, HIDDEN)]]
    assert seen.others == ["aten::empty_like"]  # of the weight's gradient


def loss_of(logits: Tensor, overwrite: bool) -> Tensor:
    logits = logits.flatten(0, -2)
    return (cross_entropy(logits, torch.arange(len(logits)), Axis(), overwrite) * torch.arange(len(logits))).sum()


@pytest.mark.parametrize("overwrite", [False, True])
def test_nan_in_rows_of_padding_is_in_no_result(overwrite: bool) -> None:
    """Neither that of the weight nor what it leaves in the gaps between logits."""
    generator = torch.Generator().manual_seed(0)
    x, ids = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 3, 8), (13, 8)))
    weight = torch.cat([ids, torch.full((3, 8), torch.nan, dtype=torch.float64)])
    given, plain = [[a.clone().requires_grad_(), b.requires_grad_()] for a, b in ((x, weight), (x, ids))]

    logits = project_to_vocab(*given, VocabRange(0, 13), ParallelContext())
    assert logits.stride(1) == 16
    loss = loss_of(logits, overwrite)
    loss.backward()
    reference = loss_of(F.linear(*plain), overwrite=False)
    reference.backward()
    assert torch.allclose(loss, reference, rtol=1e-12)
    assert torch.allclose(given[0].grad, plain[0].grad, rtol=1e-12, atol=1e-14)
    assert torch.allclose(given[1].grad[:13], plain[1].grad, rtol=1e-12, atol=1e-14)
    assert torch.equal(given[1].grad[13:], torch.zeros(3, 8, dtype=torch.float64))
    with torch.no_grad():
        assert torch.allclose(project_to_vocab(*given, VocabRange(0, 13), ParallelContext()), F.linear(*plain))


def test_logits_may_be_changed_in_place_before_the_loss() -> None:
    """By a loss of the user, such as one that rules tokens out."""
    weight = torch.arange(32.0).view(8, 4).requires_grad_()
    logits = project_to_vocab(torch.ones(1, 2, 4), weight, VocabRange(0, 5), ParallelContext())
    logits[..., 3] = 0.0
    logits.sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [2.0, 2.0, 2.0, 0.0, 2.0, 0.0, 0.0, 0.0]
