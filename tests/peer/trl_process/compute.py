"""What TRL's DPOTrainer computes: runs in an environment with trl. `python compute.py JOB.json`.

A job: policy, reference (folders), pairs [[prompt, chosen, rejected]] of token ids, losses [[loss_type, label
smoothing]], beta, out (file). out gets for each loss `N.loss`, `N.grad.NAME` of the policy's parameters and
`N.metric.NAME`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

warnings.simplefilter("ignore")


def tokenizer_of_numbers(count: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(count)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1", pad_token="2", unk_token="0")


def batch_of(pairs: list) -> dict[str, torch.Tensor]:
    """Chosen rows, then rejected ones, padded at the right."""
    rows = [[(prompt, answers[side]) for prompt, *answers in pairs] for side in (0, 1)]
    listed = [*rows[0], *rows[1]]
    length = max(len(prompt) + len(answer) for prompt, answer in listed)
    shape = (len(listed), length)
    batch = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "attention_mask", "completion_mask")}
    for row, (prompt, answer) in enumerate(listed):
        whole = [*prompt, *answer]
        batch["input_ids"][row, : len(whole)] = torch.tensor(whole)
        batch["attention_mask"][row, : len(whole)] = 1
        batch["completion_mask"][row, len(prompt) : len(whole)] = 1
    return batch


def main(job: dict) -> None:
    found = {}
    text = Dataset.from_list([{"prompt": "3 4", "chosen": " 5", "rejected": " 6"}])
    for number, (name, smoothing) in enumerate(job["losses"]):
        policy, reference = (
            AutoModelForCausalLM.from_pretrained(job[which], dtype=torch.float32, attn_implementation="eager")
            for which in ("policy", "reference")
        )
        with tempfile.TemporaryDirectory() as folder:
            arguments = DPOConfig(
                output_dir=folder,
                loss_type=name,
                beta=job["beta"],
                label_smoothing=smoothing,
                report_to=[],
                use_cpu=True,
                gradient_checkpointing=False,
                bf16=False,
            )
            trainer = DPOTrainer(
                model=policy,
                ref_model=reference,
                args=arguments,
                train_dataset=text,
                processing_class=tokenizer_of_numbers(job["vocabulary"]),
            )
        trainer.model.eval()
        loss = trainer._compute_loss(trainer.model, batch_of(job["pairs"]), return_outputs=False)
        loss.backward()
        found[f"{number}.loss"] = loss.detach().clone()
        for parameter, value in trainer.model.named_parameters():
            found[f"{number}.grad.{parameter}"] = value.grad.clone()
        for metric, values in trainer._metrics["eval"].items():
            found[f"{number}.metric.{metric}"] = torch.tensor(values[-1])
    save_file({name: value.contiguous() for name, value in found.items()}, job["out"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open(sys.argv[1], encoding="utf-8") as file:
        main(json.load(file))
