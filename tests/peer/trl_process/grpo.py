"""What TRL's GRPOTrainer computes: runs in an environment with trl. `python grpo.py JOB.json`.

A job: policy (folder), samples [[prompt, completion, log-probabilities of the old policy, those of the reference]] of
token ids, groups (completions of a prompt), rewards [one of each sample], cases [[options of GRPOConfig, advantages]],
scales [scale_rewards], out (file). out gets for each case `N.loss`, `N.grad.NAME` of the policy's parameters and
`N.metric.NAME`, and for each scale `N.advantages`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from typing import Any

import torch
from compute import tokenizer_of_numbers
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

warnings.simplefilter("ignore")


def trainer_of(job: dict, options: dict, rewards: Any) -> GRPOTrainer:
    policy = AutoModelForCausalLM.from_pretrained(job["policy"], dtype=torch.float32, attn_implementation="eager")
    text = Dataset.from_list([{"prompt": "3 4"}, {"prompt": "5 6"}] * 4)
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(job["samples"]),
            num_generations=job["groups"],
            max_completion_length=job["longest"],
            report_to=[],
            use_cpu=True,
            gradient_checkpointing=False,
            bf16=False,
            **options,
        )
        return GRPOTrainer(
            model=policy,
            reward_funcs=rewards,
            args=arguments,
            train_dataset=text,
            processing_class=tokenizer_of_numbers(job["vocabulary"]),
        )


def padded(rows: list, at_left: bool, filling: float) -> torch.Tensor:
    width = max(map(len, rows))
    fills = [[filling] * (width - len(row)) for row in rows]
    return torch.tensor([[*fill, *row] if at_left else [*row, *fill] for row, fill in zip(rows, fills, strict=True)])


def batch_of(job: dict, advantages: list[float]) -> dict[str, torch.Tensor]:
    prompts, completions, old, reference = zip(*job["samples"], strict=True)
    mask = padded([[1] * len(row) for row in completions], False, 0)
    return {
        "prompt_ids": padded(prompts, True, 2),
        "prompt_mask": padded([[1] * len(row) for row in prompts], True, 0),
        "completion_ids": padded(completions, False, 2),
        "completion_mask": mask,
        "old_per_token_logps": padded(old, False, 0.0),
        "ref_per_token_logps": padded(reference, False, 0.0),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": mask.sum(),
    }


def losses(job: dict) -> dict[str, torch.Tensor]:
    found = {}
    for number, (options, advantages) in enumerate(job["cases"]):
        trainer = trainer_of(job, options, lambda completions, **_: [0.0] * len(completions))
        trainer.model.eval()
        loss = trainer._compute_loss(trainer.model, batch_of(job, advantages))
        loss.backward()
        found[f"{number}.loss"] = loss.detach().clone()
        for parameter, value in trainer.model.named_parameters():
            found[f"{number}.grad.{parameter}"] = value.grad.clone()
        for metric, values in trainer._metrics["eval"].items():
            found[f"{number}.metric.{metric}"] = torch.tensor(float(values[-1]))
    return found


def group_advantages(job: dict) -> dict[str, torch.Tensor]:
    """Of completions that the trainer draws itself, with the rewards of the job."""
    found = {}
    for number, scale in enumerate(job["scales"]):
        trainer = trainer_of(job, {"scale_rewards": scale}, lambda completions, **_: job["rewards"])
        prompts = [{"prompt": "3 4"}] * job["groups"] + [{"prompt": "5 6"}] * job["groups"]
        found[f"{number}.advantages"] = trainer._generate_and_score_completions(prompts)["advantages"]
    return found


def main(job: dict) -> None:
    found = {**losses(job), **group_advantages(job)}
    save_file({name: value.contiguous() for name, value in found.items()}, job["out"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open(sys.argv[1], encoding="utf-8") as file:
        main(json.load(file))
