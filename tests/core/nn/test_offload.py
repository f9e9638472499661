"""Activations of single modules in host memory: the same gradients, and copies of what was named, without weights."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tests.models.plugin_host import host

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn import offload
from mt_core.train.trainer import Trainer

EVERY = ("attn_norm", "attn_proj", "core_attn", "expert_fc1", "mlp_norm", "moe_act", "qkv_linear")
RUN = (
    "data.seq_length=16",
    "data.corpus_bytes=200000",
    "train.micro_batch_size=2",
    "train.global_batch_size=2",
    "train.train_iters=1",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "checkpoint.save_interval=null",
    "logging.progress=none",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
)
MIXTRAL = (
    "model.family=mixtral",
    "model.ffn_hidden_size=48",
    "model.moe.num_experts=4",
    "model.moe.moe_ffn_hidden_size=24",
)
LATENT = (
    *("model.family=deepseek", "model.kv_lora_rank=10", "model.qk_head_dim=8", "model.qk_pos_emb_head_dim=4"),
    *("model.v_head_dim=8", "model.q_lora_rank=12", "model.ffn_hidden_size=48"),
    *("model.moe.num_experts=4", "model.moe.moe_ffn_hidden_size=24", "model.moe.moe_layer_freq='[0,1]'"),
)
GPT = ("model.family=gpt", "model.max_position_embeddings=16")


def offloads(*names: str) -> tuple[str, ...]:
    listed = ", ".join(f'"{name}"' for name in names)
    return (f"recompute.offload_modules=[{listed}]", "recompute.min_offloaded_tensor_size=1")


def gradients(*overrides: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Of a step: of every parameter, and the tensors that were copied."""
    torch.set_num_threads(1)
    trainer = Trainer(load_config(overrides=[*RUN, *overrides], host=host()), host=host())
    copied: list[torch.Tensor] = []

    def noting(self, tensor: torch.Tensor) -> offload.HostCopy:
        copied.append(tensor)
        return copy(self, tensor)

    copy = offload.Offload._copy
    model = trainer.engine.model.train()
    tokens = torch.arange(32).view(2, 16)
    with mock.patch.object(offload.Offload, "_copy", noting):
        model(tokens).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, copied


def assert_same(*model: str, offloaded: tuple[str, ...], further: tuple[str, ...] = ()) -> list[torch.Tensor]:
    (plain, nothing), (other, copied) = gradients(*model, *further), gradients(*model, *further, *offloads(*offloaded))
    assert nothing == []
    for name, gradient in plain.items():
        assert torch.equal(gradient, other[name]), name
    return copied


@pytest.mark.parametrize("name", EVERY)
def test_each_module_alone_changes_no_gradient(name) -> None:
    assert len(assert_same(*MIXTRAL, offloaded=(name,))) >= 2


@pytest.mark.parametrize("model", [MIXTRAL, LATENT])
def test_all_of_them_beside_recomputation(model) -> None:
    modules = '"layernorm", "moe_act"' if model is MIXTRAL else '"mla_up_proj", "mlp", "moe_act"'
    further = ("recompute.recompute_granularity=selective", f"recompute.recompute_modules=[{modules}]")
    assert assert_same(*model, offloaded=EVERY, further=further)
    assert assert_same(*model, offloaded=EVERY)


def test_weights_stay_where_they_are() -> None:
    """linear_proj keeps its input, 2 x 16 positions of 32 channels, and not its weight [32, 32] with it."""
    copied = assert_same(*GPT, offloaded=("attn_proj",))
    assert [tensor.numel() for tensor in copied] == [1024] * 2


def test_small_tensors_stay_where_they_are() -> None:
    listed = ("recompute.offload_modules=['attn_proj']", "recompute.min_offloaded_tensor_size=1025")
    assert gradients(*GPT, *listed)[1] == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (offloads("expert_fc1", "moe_act"), "offload_modules has expert_fc1, moe_act, which this model has not"),
        (
            (*offloads("attn_proj"), "recompute.recompute_granularity=full"),
            "recompute_granularity=full keeps the inputs",
        ),
        ((*offloads("attn_proj"), "train.compile=layers"), "train.compile"),
        (("recompute.min_offloaded_tensor_size=5",), "would be ignored: set recompute.offload_modules too"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(overrides, words) -> None:
    with pytest.raises(ConfigError, match=words):
        gradients(*GPT, *overrides)
