"""Twenty steps of the real Trainer beside a plain loop over the reference: same weights, samples, rates and AdamW.

BERT and T5, whose samples need files, are compared the same way in test_bert_training.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mt_core.config.loading import load_config
from mt_core.specs import MODELS
from mt_core.train import Callback, Trainer
from mt_models.hugging_face import to_reference

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

STEPS, SIZE, LENGTH = 20, 4, 32
RUN = [
    f"data.seq_length={LENGTH}",
    "data.corpus_bytes=1000000",
    f"train.train_iters={STEPS}",
    f"train.global_batch_size={SIZE}",
    "train.micro_batch_size=2",
    "train.eval_interval=null",
    "train.num_threads=1",
    "checkpoint.save_interval=null",
    "logging.progress=none",
    "optimizer.lr=3e-3",
    "optimizer.min_lr=0",
    "optimizer.weight_decay=0.1",
    "optimizer.adam_beta2=0.95",
    "lr_schedule.lr_decay_style=cosine",
    "lr_schedule.lr_warmup_iters=4",
]
ATTENTION = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
MAMBA = {
    "num_layers": 2,
    "hidden_size": 32,
    "mamba_head_dim": 16,
    "mamba_state_dim": 8,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 16,
}
CASES = {
    "gpt": ("GPT2LMHeadModel", ATTENTION | {"max_position_embeddings": LENGTH, "activation": "gelu_tanh"}),
    "llama": ("LlamaForCausalLM", ATTENTION | {"num_query_groups": 2}),
    "mistral": ("MistralForCausalLM", ATTENTION | {"num_query_groups": 2, "sliding_window": 9}),
    "qwen": ("Qwen3ForCausalLM", ATTENTION | {"qk_layernorm": True, "add_qkv_bias": False, "kv_channels": 8}),
    "gemma": ("Gemma3ForCausalLM", ATTENTION | {"num_query_groups": 1, "kv_channels": 8, "sliding_window": 9}),
    "mamba": ("Mamba2ForCausalLM", MAMBA),
}


class Losses(Callback):
    """Remembers the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step_end(self, run, metrics) -> None:
        self.values.append(metrics["loss"])


def reference_of(trainer: Trainer, name: str, host) -> nn.Module:
    """The class of transformers, from what our maps write: configuration and weights."""
    family = host[MODELS].get(trainer.config.model.family).name_maps["hf"].load()
    kind = getattr(transformers, name)
    external = family.write_config(trainer.config.model)
    reference = kind(kind.config_class(**{key: external[key] for key in external if key != "model_type"}))
    missing, unexpected = reference.load_state_dict(to_reference(trainer.model, family), strict=False)
    assert not unexpected
    assert set(missing) <= set(family.copies(trainer.config.model))
    return reference.train()


def plain_loop(reference: nn.Module, trainer: Trainer) -> list[float]:
    """AdamW, decay of matrices alone, clipping of the global norm."""
    parameters = list(reference.parameters())
    matrices = [p for p in parameters if p.squeeze().ndim > 1]
    others = [p for p in parameters if p.squeeze().ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    for step in range(STEPS):
        rows = [trainer.train_data[step * SIZE + row] for row in range(SIZE)]
        tokens, labels = (torch.stack([torch.from_numpy(row[name]) for row in rows]) for name in ("tokens", "labels"))
        loss = F.cross_entropy(reference(tokens).logits.transpose(1, 2), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = trainer.engine.schedule(step * SIZE)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", CASES)
def test_twenty_steps_equal_those_of_a_plain_loop(host, family) -> None:
    name, keys = CASES[family]
    settings = [
        f"model.{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()
    ]
    config = load_config(overrides=[f"model.family={family}", *settings, *RUN], host=host)
    losses = Losses()
    trainer = Trainer(config, host=host, valid_data={}, callbacks=[losses])
    expected = plain_loop(reference_of(trainer, name, host), trainer)
    trainer.train()
    assert losses.values == pytest.approx(expected, abs=1e-4)
    assert losses.values[-1] < losses.values[0] - 0.5
