"""What families read of `model.moe` is what mt-moe makes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mt_core.config.layer_pattern import layers_with_experts
from mt_models.blocks.hugging_face_moe import StackedExperts
from mt_models.blocks.moe import DEFAULTS, MoEOptions, frequency_of

moe_config = pytest.importorskip("mt_moe.config")


def test_defaults_are_those_of_the_feed_forward() -> None:
    fields = moe_config.MoeConfig.model_fields
    assert {key: fields[key].default for key in DEFAULTS} == dict(DEFAULTS)


@pytest.mark.parametrize("layers", [[True] * 3, [False, True, True], [True, False, True], [False] * 2])
def test_a_frequency_is_written_as_it_is_read(layers) -> None:
    assert layers_with_experts(frequency_of(layers), len(layers)) == layers


def test_dense_layers_that_do_not_come_first_have_no_number() -> None:
    def moe_options(freq) -> MoEOptions:
        return MoEOptions(SimpleNamespace(moe={"num_experts": 4, "moe_layer_freq": freq}, num_layers=4, ffn_size=8))

    assert [moe_options(freq).first_dense for freq in (1, "[0]*3+[1]", "[0]*4", 2)] == [0, 3, 4, None]


def test_experts_are_stacked_with_their_gate_rows_first_and_taken_apart_again() -> None:
    names = tuple(f"{e}.{half}" for e in range(3) for half in ("gate", "up"))
    tensors = [torch.full((2, 5), float(number)) for number in range(6)]
    rule = StackedExperts("fc1", names, experts=3)
    stacked = rule.import_value(tensors)
    assert stacked.shape == (3, 4, 5)
    assert stacked[:, :, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]
    assert all(torch.equal(a, b) for a, b in zip(rule.export_value(stacked), tensors, strict=True))
