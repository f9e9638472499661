"""What PEFT computes: runs in an environment with peft and transformers. `python compute.py JOBS.json`.

A job: base (folder), adapter (folder), tokens, out (file). create: the class of a PEFT configuration and its keys; the
adapter is made, its parameters moved away from their initial values, and saved. Without it the adapter is loaded.
out gets `logits`, `merged` and `grad.NAME` of the mean loss of the next tokens, by the names of the adapter's file.
"""

from __future__ import annotations

import json
import sys
import warnings

import peft
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

warnings.simplefilter("ignore")


def model_of(job: dict) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32, attn_implementation="eager")
    if (created := job.get("create")) is None:
        return PeftModel.from_pretrained(base, job["adapter"], is_trainable=True)
    name, keys = created
    torch.manual_seed(5)
    model = get_peft_model(base, getattr(peft, name)(**keys))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(job["adapter"])
    return model


def compute(job: dict) -> None:
    model = model_of(job).eval()
    tokens = torch.tensor(job["tokens"])
    logits = model(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    found = {"logits": logits.detach().clone()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            found[f"grad.{name.replace('.default', '')}"] = parameter.grad.clone()
    if job.get("merge", True):
        with torch.no_grad():
            found["merged"] = model.merge_and_unload()(input_ids=tokens).logits.clone()
    save_file({name: value.contiguous() for name, value in found.items()}, job["out"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open(sys.argv[1], encoding="utf-8") as file:
        jobs = json.load(file)
    for job in jobs:
        try:
            compute(job)
        except Exception as error:
            with open(job["out"] + ".error", "w", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {error}")
            if len(jobs) == 1:
                raise
