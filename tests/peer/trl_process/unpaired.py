"""What TRL's KTOTrainer computes: runs in an environment with trl. `python unpaired.py JOB.json`.

A job: policy, reference (folders), answers [[prompt, answer, desirable]] of token ids, losses [[loss_type, weight of
desirable answers, weight of others]], beta, out (file). out gets for each loss `N.loss`, `N.grad.NAME` of the policy's
parameters and `N.metric.NAME`. The answers to other prompts are those of the answer before, as TRL has them in a batch.
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
from transformers import AutoModelForCausalLM
from trl import KTOConfig, KTOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

warnings.simplefilter("ignore")


def batch_of(answers: list) -> dict[str, torch.Tensor]:
    rotated = [answers[-1][1], *(answer for _, answer, _ in answers[:-1])]
    examples = [
        {"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": other, "label": desirable}
        for (prompt, answer, desirable), other in zip(answers, rotated, strict=True)
    ]
    return DataCollatorForUnpairedPreference(pad_token_id=2)(examples)


def main(job: dict) -> None:
    found = {}
    text = Dataset.from_list([{"prompt": "3 4", "completion": " 5", "label": bool(n)} for n in (0, 1)])
    for number, (name, desirable, undesirable) in enumerate(job["losses"]):
        policy, reference = (
            AutoModelForCausalLM.from_pretrained(job[which], dtype=torch.float32, attn_implementation="eager")
            for which in ("policy", "reference")
        )
        with tempfile.TemporaryDirectory() as folder:
            arguments = KTOConfig(
                output_dir=folder,
                loss_type=name,
                beta=job["beta"],
                desirable_weight=desirable,
                undesirable_weight=undesirable,
                per_device_train_batch_size=2,
                report_to=[],
                use_cpu=True,
                gradient_checkpointing=False,
                bf16=False,
            )
            trainer = KTOTrainer(
                model=policy,
                ref_model=reference,
                args=arguments,
                train_dataset=text,
                processing_class=tokenizer_of_numbers(job["vocabulary"]),
            )
        trainer.model.eval()
        loss = trainer._compute_loss(trainer.model, batch_of(job["answers"]), return_outputs=False)
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
