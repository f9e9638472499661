"""Run by lm_eval's environment: tasks on its own `hf` model, and on ours in several layouts; writes what it logs.

Arguments: JSON with "model" (a folder), "tasks" (names), "include_path", "layouts" (name -> section [parallel], on as
many ranks as it has of tensor parallelism, else two; null for one process), "options" (of HarnessOptions), "hf"
(arguments of the `hf` model), "output" (a folder).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from mt_core.testing import run_ranks
from mt_eval.harness.evaluation import HarnessOptions, run_harness
from mt_infer.text import TextGenerator


def of_hf(job: dict[str, Any]) -> dict[str, Any]:
    options = job["options"]
    is_chat = options.get("apply_chat_template", False)
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": job["model"], "dtype": "float32", **job["hf"]},
        tasks=job["tasks"],
        task_manager=TaskManager(include_path=job["include_path"], include_defaults=False),
        batch_size=1,
        device="cpu",
        bootstrap_iters=0,
        apply_chat_template=is_chat,
        fewshot_as_multiturn=is_chat,
        system_instruction=options.get("system_instruction"),
        num_fewshot=options.get("num_fewshot"),
    )
    return {"results": results["results"], "samples": results["samples"]}


def of_mt(rank: int, world: int, job: dict[str, Any], layout: str) -> None:
    """Writes a result file, with samples beside it."""
    generator = TextGenerator.load(job["model"], device="cpu", settings={"parallel": job["layouts"][layout]})
    if rank > 0:
        generator.follow()
        return
    options = HarnessOptions(
        tasks=tuple(job["tasks"]),
        include_path=Path(job["include_path"]),
        log_samples=True,
        bootstrap_iters=0,
        **job["options"],
    )
    run_harness(generator, job["model"], options, output=Path(job["output"]) / f"{layout}.json")
    generator.close()


def main() -> None:
    job = json.loads(sys.argv[1])
    expected = json.dumps(of_hf(job), default=handle_non_serializable)
    (Path(job["output"]) / "hf.json").write_text(expected)
    for layout, parallel in job["layouts"].items():
        if parallel is None:
            job["layouts"][layout] = {}
            of_mt(0, 1, job, layout)
        else:
            run_ranks(parallel.get("tensor_model_parallel_size", 2), of_mt, job, layout)


if __name__ == "__main__":
    main()
