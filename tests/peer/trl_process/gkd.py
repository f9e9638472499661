"""What TRL's GKDTrainer minimizes: runs in an environment with trl. `python gkd.py JOB.json`.

A job: logits (safetensors with student and teacher [B, S, V] and labels), cases [[beta, temperature]], out (file). out
gets for each case `N.loss` and `N.grad`, the gradient of the student's logits.
"""

from __future__ import annotations

import json
import sys
import warnings

from safetensors.torch import load_file, save_file
from trl.experimental.gkd import GKDTrainer

warnings.simplefilter("ignore")


def main(job: dict) -> None:
    tensors = load_file(job["logits"])
    found = {}
    for number, (beta, temperature) in enumerate(job["cases"]):
        student = tensors["student"].clone().requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(student, tensors["teacher"], tensors["labels"], beta, temperature)
        loss.backward()
        found |= {f"{number}.loss": loss.detach().clone(), f"{number}.grad": student.grad.clone()}
    save_file(found, job["out"])


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        main(json.load(file))
