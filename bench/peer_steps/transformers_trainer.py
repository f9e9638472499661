"""transformers' Trainer. It runs its own loop: a step begins when a line arrives, and is answered when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch
from cases import Case
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def model_config(case: Case) -> Any:
    if case.family == "gpt":
        return GPT2Config(
            vocab_size=case.vocab,
            n_positions=case.sequence,
            activation_function="gelu",
            use_cache=False,
            n_embd=case.hidden,
            n_layer=case.layers,
            n_head=case.heads,
            n_inner=case.ffn,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    sizes: dict[str, Any] = {
        "vocab_size": case.vocab,
        "hidden_size": case.hidden,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.heads,
        "intermediate_size": case.ffn,
        "max_position_embeddings": case.sequence,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    if case.experts:
        return MixtralConfig(
            num_local_experts=case.experts, num_experts_per_tok=case.topk, sliding_window=None, **sizes
        )
    return LlamaConfig(**sizes)


class Batches(IterableDataset):
    def __init__(self, draw: Callable[[], Tensor]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            for ids in self.draw():
                # shift_labels: as many targets as tokens, as the others have; labels would be shifted by the model,
                # which leaves the last token without a target. Without labels it computes no loss.
                yield {"input_ids": ids[:-1], "labels": ids[1:], "shift_labels": ids[1:]}


class Served(TrainerCallback):
    def __init__(self, begin: Callable[[], None], end: Callable[[float], None]) -> None:
        self.begin, self.end = begin, end

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.end(float("nan"))


def run(case: Case, draw: Callable[[], Tensor], begin: Callable[[], None], end: Callable[[float], None]) -> None:
    model = AutoModelForCausalLM.from_config(model_config(case), attn_implementation="sdpa", dtype=torch.float32)
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=10**6,
            per_device_train_batch_size=case.batch,
            learning_rate=1e-4,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            # shift_labels are no argument of the models' signatures.
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=Batches(draw), callbacks=[Served(begin, end)]).train()
