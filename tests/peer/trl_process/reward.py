"""What TRL's RewardTrainer computes: runs in an environment with trl. `python reward.py JOB.json`.

A job: model (folder of a LlamaForSequenceClassification), pairs [[prompt, chosen, rejected]] of token ids, cases
[[centring, [margin of each pair] or null]], vocabulary, out (file). out gets for each case `N.loss`, `N.grad.NAME` and
`N.metric.NAME`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings

import torch
from compute import tokenizer_of_numbers
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

warnings.simplefilter("ignore")


def batch_of(pairs: list, margins: list | None) -> dict[str, torch.Tensor]:
    examples = [
        {"chosen_ids": [*prompt, *chosen], "rejected_ids": [*prompt, *rejected]} for prompt, chosen, rejected in pairs
    ]
    if margins is not None:
        examples = [{**example, "margin": margin} for example, margin in zip(examples, margins, strict=True)]
    return DataCollatorForPreference(pad_token_id=2)(examples)


def main(job: dict) -> None:
    found = {}
    text = Dataset.from_list([{"chosen": "3 4 5", "rejected": "3 4 6"}])
    for number, (centring, margins) in enumerate(job["cases"]):
        model = AutoModelForSequenceClassification.from_pretrained(
            job["model"], dtype=torch.float32, attn_implementation="eager"
        )
        with tempfile.TemporaryDirectory() as folder:
            arguments = RewardConfig(
                output_dir=folder,
                center_rewards_coefficient=centring,
                report_to=[],
                use_cpu=True,
                gradient_checkpointing=False,
                bf16=False,
            )
            trainer = RewardTrainer(
                model=model,
                args=arguments,
                train_dataset=text,
                processing_class=tokenizer_of_numbers(job["vocabulary"]),
            )
        trainer.model.eval()
        loss = trainer.compute_loss(trainer.model, batch_of(job["pairs"], margins))
        loss.backward()
        found[f"{number}.loss"] = loss.detach().clone()
        for parameter, value in trainer.model.named_parameters():
            found[f"{number}.grad.{parameter}"] = value.grad.clone()
        for metric, values in trainer._metrics["eval"].items():
            found[f"{number}.metric.{metric}"] = torch.tensor(float(values[-1]))
    save_file({name: value.contiguous() for name, value in found.items()}, job["out"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open(sys.argv[1], encoding="utf-8") as file:
        main(json.load(file))
