"""What families declare of their modules: inputs, text generation, pipeline stages."""

from __future__ import annotations

import pytest
import torch
from tests.ckpt.convert_cases import MODELS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mt_core import specs
from mt_core.config.loading import config_from_dict
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.model import Model, SupportsGeneration, as_generator, contract, is_pipelined
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train.losses import KeptLogits


@pytest.fixture(scope="module")
def host():
    return load_plugins()


def build(host, keys) -> nn.Module:
    config = config_from_dict({"model": keys}, host)
    ctx = ParallelContext(device=torch.device("meta"))
    return host[specs.MODELS].get(config.model.family).build.load()(config.model, ModelBuildContext(config, ctx, host))


@pytest.mark.parametrize("name", MODELS)
def test_every_family_builds_a_model_under_the_contract(name, host) -> None:
    model = build(host, MODELS[name])
    assert isinstance(model, Model)
    assert isinstance(model, SupportsGeneration) == (name not in ("bert", "modernbert", "vision"))
    assert isinstance(model, SupportsGeneration) or not model.continues_text


class CopiesToDevice(TorchDispatchMode):
    """Counts copies from the CPU to the model's device, for which the host waits."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten._to_copy.default and args[0].device != out.device
        return out


RETRO = {"family": "retro", "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
RETRO |= {"retro_chunk_length": 4, "retro_cross_attention_layers": [2], "position_embedding_type": "rope"}


@pytest.mark.parametrize(
    "keys",
    [
        MODELS["gpt_neox"],
        MODELS["gemma3"],
        MODELS["phi3"],
        MODELS["olmo"],
        MODELS["ministral3"],
        MODELS["hybrid"] | {"position_embedding_type": "rope"},
        RETRO,
    ],
    ids=lambda k: k["family"],
)
def test_only_the_first_forward_pass_moves_rotary_frequencies(keys, host) -> None:
    model, tokens = build(host, keys), torch.zeros(1, 8, dtype=torch.long, device="meta")
    counts = []
    for _ in range(2):
        with CopiesToDevice() as copies:
            model(tokens)
        counts.append(copies.count)
    assert counts[0] > 0
    assert counts[1] == 0


def test_a_head_on_a_decoder_neither_continues_text_nor_is_cut(host) -> None:
    keys = {**MODELS["llama"], "family": "llama_classification", "num_classes": 3}
    model = build(host, keys)
    assert not is_pipelined(model)
    with pytest.raises(ConfigError, match="does not generate text"):
        as_generator(model)
    assert is_pipelined(build(host, MODELS["llama"]))


@pytest.mark.parametrize("head", ["classification", "multiple_choice"])
def test_logits_of_a_head_are_kept_as_they_are(host, head: str) -> None:
    """Not gathered over tensor-parallel ranks, each of which has all of them."""
    keys = {**MODELS["llama"], "family": f"llama_{head}"} | ({"num_classes": 3} if head == "classification" else {})
    model, config = build(host, keys), config_from_dict({"model": keys}, host)
    ranks = ParallelContext(axes={"tp": Axis(size=2, ranks=(0, 1))})
    kept, logits = KeptLogits(lambda output, batch: output, config, ranks, model), torch.ones(2, 3)
    kept.begin()
    kept(logits, {})
    assert torch.equal(kept.take(), logits)


def test_layers_to_divide_are_those_of_all_stacks(host) -> None:
    stacked = {name: config_from_dict({"model": MODELS[name]}, host).model.stacked_layers for name in ("llama", "t5")}
    assert stacked == {"llama": 3, "t5": 6}


def test_a_plain_module_stands_under_the_defaults() -> None:
    plain = contract(nn.Linear(2, 2))
    assert plain.inputs == ("input",)  # as its forward names them
    assert not plain.continues_text
    assert plain.predicts_tokens
    assert plain.needs_logits is None
    assert not is_pipelined(nn.Linear(2, 2))
