"""Models that `transformers` made, through mt's own format and back: the same bits, and the same model to both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.family_cases import CASES, Case, class_named, make_model, output_of
from torch import Tensor, nn

from mt_ckpt.convert import convert
from mt_ckpt.native.read import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.specs import MODELS

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("without_waiting_for_the_disk")


WITHOUT_HEAD = "glm5_next"
"""What transformers has without an LM head, so that its loss is computed by mt, of the files of both."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_from_transformers_through_ours_and_back(host, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    reference = make_model(case)
    reference.save_pretrained(tmp_path / "first")
    report = convert(tmp_path / "first", tmp_path / "mt", saver="mt", verify=True, host=host)
    assert report.family == case.family
    assert report.verification is not None
    loss = report.verification.loss
    assert loss is None or loss.source_reader == "transformers" or (name == WITHOUT_HEAD and loss.source == loss.target)
    convert(tmp_path / "mt", tmp_path / "second", saver="hf", options=ConvertOptions(max_shard_size=30_000), host=host)
    loader = class_named(case.auto_class)
    loaded, info = loader.from_pretrained(tmp_path / "second", output_loading_info=True, attn_implementation="eager")
    assert not any(map(case.uses, info["missing_keys"]))
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert_same_state(used_by(case, reference), used_by(case, loaded))
    expected = output_of(reference, case)
    assert expected.isfinite().all()
    # Bits of sums depend on where in memory the weights lie.
    torch.testing.assert_close(output_of(loaded.eval(), case), expected, atol=1e-6, rtol=1e-6)
    convert(tmp_path / "second", tmp_path / "again", saver="mt", host=host)
    assert_same_state(tensors_of(open_checkpoint(tmp_path / "mt")), tensors_of(open_checkpoint(tmp_path / "again")))


def used_by(case: Case, model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if case.uses(name)}


def test_every_family_with_a_map_is_here(host) -> None:
    mapped = {spec.name for spec in host[MODELS] if "hf" in spec.name_maps}
    # transformers has no class for RWKV-7 and Kimi K3: tests/models/test_rwkv7.py and test_kimi_k3.py compare with
    # their formulas.
    assert mapped - {"rwkv7", "kimi_k3"} == {case.family for case in CASES.values()}
