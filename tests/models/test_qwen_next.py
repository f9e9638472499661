"""Qwen3-Next and Qwen3.5 against `transformers`: functions, gradients, names, positions, documents, prediction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref

from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import auxiliary_losses
from mt_core.nn.layout import parameter_layouts
from mt_models.hugging_face import load_reference, to_reference
from mt_models.qwen_next.config import flops_per_token

transformers = pytest.importorskip("transformers")

VOCAB = 103
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "intermediate_size": 44,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
EXPERTS |= {"shared_expert_intermediate_size": 20}
CASES = {
    "Qwen3-Next": ("Qwen3Next", "Qwen3Next", EXPERTS),
    "Qwen3-Next, dense layers, unnormalized": (
        "Qwen3Next",
        "Qwen3Next",
        {**EXPERTS, "mlp_only_layers": [1, 4], "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "Qwen3-Next, all dense": ("Qwen3Next", "Qwen3Next", {"num_experts": 0}),
    "Qwen3.5": ("Qwen3_5", "Qwen3_5Text", {"linear_num_value_heads": 3, "layer_types": ["full_attention"] * 2 + ["linear_attention"] * 3}),
    "Qwen3.5 of experts": ("Qwen3_5Moe", "Qwen3_5MoeText", EXPERTS),
}  # fmt: skip


def reference(case: str, **more):
    stem, config, keys = CASES[case]
    # A field that a class does not have would be kept as an unknown one.
    kind = getattr(transformers, f"{config}Config")
    fields = {key: value for key, value in {**SHAPE, **keys, **more}.items() if key in dir(kind) or key.endswith("_implementation")}  # fmt: skip
    return getattr(transformers, f"{stem}ForCausalLM")(kind(**fields))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case) -> None:
    pair = ref.make_pair(host, reference(case), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 77))  # more than a chunk of 64
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tensors_and_configurations_go_both_ways(host, randomize, case) -> None:
    pair = ref.make_pair(host, reference(case), randomize)
    ref.assert_maps_round_trip(pair)
