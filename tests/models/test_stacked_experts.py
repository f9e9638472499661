"""Files with the experts of a layer in one tensor, as transformers 5 has them in memory, are read; they are written one
by one."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import Tensor, nn

from mt_core.errors import CheckpointError
from mt_core.name_map import Concatenate, NameMap, Same
from mt_models.hugging_face import load_reference, to_reference

transformers = pytest.importorskip("transformers")

VOCAB, LAYERS, EXPERTS = 61, 2, 4
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
MIXTRAL = {"num_key_value_heads": 2, "intermediate_size": 12, "num_local_experts": EXPERTS}
QWEN = {"num_key_value_heads": 2, "moe_intermediate_size": 12, "num_experts": EXPERTS, "num_experts_per_tok": 2}
DEEPSEEK = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 6,
    "q_lora_rank": None,
    "num_nextn_predict_layers": 0,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS = {
    "Mixtral": MIXTRAL,
    "Qwen2Moe": {**QWEN, "intermediate_size": 20, "shared_expert_intermediate_size": 10},
    "Qwen3Moe": {**QWEN, "head_dim": 8, "intermediate_size": 20},
    "Olmoe": {"num_key_value_heads": 2, "intermediate_size": 12, "num_experts": EXPERTS, "num_experts_per_tok": 2},
    "DeepseekV3": DEEPSEEK,
}


@cache
def reference(name: str) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**COMMON, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def ours(host, name: str) -> tuple[nn.Module, object]:
    external = reference(name).config.to_dict()
    family = ref.family_of(host, external["model_type"])
    return ref.build_from(host, family.read_config(external)).eval(), family


def stacked_tensors(name: str) -> dict[str, Tensor]:
    return dict(reference(name).state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_stacked_experts_are_read_and_written_one_by_one(host, name) -> None:
    model, family = ours(host, name)
    stacked = stacked_tensors(name)
    moe_layers = len([tensor for tensor in stacked if tensor.endswith(".experts.gate_up_proj")])
    assert moe_layers == (LAYERS - 1 if name == "DeepseekV3" else LAYERS)
    load_reference(model, stacked, family)
    tokens = dense.random_tokens(VOCAB, 7)
    dense.assert_near(model(tokens), reference(name)(tokens).logits)
    back, published = to_reference(model, family), ref.published(reference(name), stacked)
    assert back.keys() == published.keys()
    assert ref.expert_tensors(back) == 3 * EXPERTS * moe_layers
    assert all(torch.equal(back[tensor], published[tensor]) for tensor in back)


def test_a_missing_expert_is_named_in_the_form_that_the_file_has(host) -> None:
    model, family = ours(host, "Qwen3Moe")
    stacked = stacked_tensors("Qwen3Moe")
    del stacked["model.layers.1.mlp.experts.down_proj"]
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.0.down_proj.weight is missing in the checkpoint"):
        load_reference(model, stacked, family)
    published = dict(ref.published(reference("Qwen3Moe"), stacked_tensors("Qwen3Moe")))
    del published["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.3.up_proj.weight is missing in the checkpoint$"):
        load_reference(model, published, family)


def test_an_expert_in_both_forms_is_refused(host) -> None:
    model, family = ours(host, "Mixtral")
    published = dict(ref.published(reference("Mixtral"), stacked_tensors("Mixtral")))
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(CheckpointError, match=f"{name} is in the checkpoint but unknown"):
        load_reference(model, {**published, name: stacked_tensors("Mixtral")[name]}, family)


def test_a_map_takes_the_form_whose_names_are_there() -> None:
    """Layer by layer; a form of which a part is there is the one whose rest is missed."""
    halves = Concatenate("l.{i}.fc1", ("l.{i}.gate", "l.{i}.up"), others=(Same("l.{i}.fc1", "l.{i}.gate_up"),))
    names = NameMap([halves], 2)
    chosen = names.reading(["l.0.gate_up", "l.1.up"])
    assert [rule.sources for rule in chosen.rules] == [("l.0.gate_up",), ("l.1.gate", "l.1.up")]
    with pytest.raises(CheckpointError, match=r"do not fit the model: l.1.gate is missing in the checkpoint$"):
        chosen.check(["l.0.fc1", "l.1.fc1"], ["l.0.gate_up", "l.1.up"])
    assert [rule.sources for rule in names.reading([]).rules] == [("l.0.gate", "l.0.up"), ("l.1.gate", "l.1.up")]
    assert [name for name, _ in names.export_value({"l.1.fc1": torch.zeros(4)})] == ["l.1.gate", "l.1.up"]
