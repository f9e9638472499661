"""Train steps without a model: what their loss functions are passed, and the loss of BERT's two heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mt_accelerate.utils import BertTrainStep
from mt_core.errors import ConfigError

LOSSES, ORDER_LOGITS = torch.rand(3, 4), torch.randn(3, 2)


def bert_step(loss_func: Any = None, **batch: Any) -> Any:
    """What the loss function gives, called as Accelerate calls a program's own."""
    step = BertTrainStep(SimpleNamespace())
    step.get_batch = step.get_batch_func(None, False)
    step.loss_func = loss_func or step.get_loss_func(None)
    labels = torch.tensor([[1, -100, 2, -100]] * 3)
    batch |= {"input_ids": labels, "labels": labels}
    output, loss_of = step.get_forward_step_func()(iter([batch]), lambda *inputs, **options: (LOSSES, ORDER_LOGITS))
    return loss_of(output)


def test_bert_adds_the_loss_of_the_sentence_order() -> None:
    order = torch.tensor([1, -1, 0])  # the second row has none
    loss, report = bert_step(next_sentence_label=order)
    assert report["lm loss"] == pytest.approx(LOSSES[:, ::2].mean())
    assert report["sop loss"] == pytest.approx(F.cross_entropy(ORDER_LOGITS[::2], order[::2]))
    assert loss == pytest.approx(report["lm loss"] + report["sop loss"])
    with pytest.raises(ConfigError, match="no next_sentence_label"):
        bert_step()


def test_a_loss_function_for_bert_is_passed_mask_order_and_both_outputs() -> None:
    order = torch.tensor([1, 1, 0])
    mask, given, output = bert_step(lambda *passed: passed, next_sentence_label=order)
    assert mask.tolist() == [[1, 0, 1, 0]] * 3
    assert given is order
    assert output == (LOSSES, ORDER_LOGITS)
