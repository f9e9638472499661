"""Runs mt and keeps what figures show of the results in data/NAME.json: python -m scripts.figures.record [NAME ...]."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.figures.registry import DATA

RECORDINGS: dict[str, Callable[[Path], Any]] = {}
PLAN = [
    "--preset", "llama3-8b", "--world-size", "64", "--set", "parallel.use_distributed_optimizer=true",
    "--set", "train.micro_batch_size=1", "--set", "train.global_batch_size=128",
]  # fmt: skip
LAYOUT = ["--set", "parallel.tensor_model_parallel_size=2", "--set", "parallel.pipeline_model_parallel_size=4"]


def recording(name: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    def register(run: Callable[[Path], Any]) -> Callable[[Path], Any]:
        RECORDINGS[name] = run
        return run

    return register


def mt(*words: str, codes: tuple[int, ...] = (0,)) -> str:
    """What a command prints. Raises RuntimeError when its exit code is none of `codes`."""
    done = subprocess.run([sys.executable, "-m", "mt_cli", *words], check=False, text=True, capture_output=True)
    if done.returncode not in codes:
        raise RuntimeError(f"mt {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def train(folder: Path, settings: Mapping[str, Any], *options: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run that logs every step."""
    common = {"logging.log_interval": 1, "logging.progress": "none", "train.sample_prompt": "null"}
    pairs = [part for key, value in {**common, **settings}.items() for part in ("--set", f"{key}={value}")]
    # 75: the run stopped before its end, as train.exit_iteration asks.
    mt("train", *pairs, "--run-dir", str(folder), *options, codes=(0, 75))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def columns(lines: list[dict[str, Any]], *keys: str, kind: str = "train") -> dict[str, list[Any]]:
    kept = [line for line in lines if line["kind"] == kind]
    return {key: [_rounded(line.get(key)) for line in kept] for key in ("iteration", *keys)}


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


@recording("plan")
def plan(folder: Path) -> Any:
    """Memory of each pipeline rank with and without recomputation."""
    values = {}
    for name, recompute in (
        ("none", []),
        ("full", ["recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"]),
    ):
        settings = [part for key in recompute for part in ("--set", f"recompute.{key}")]
        values[name] = json.loads(mt("plan", *PLAN, *LAYOUT, *settings, "--json"))["ranks"]
    return {
        name: [
            {
                "bytes": rank["bytes"],
                "gib": _rounded(rank["gib"]),
                "sent": {axis: row["sent"] for axis, row in rank["messages"].items()},
            }
            for rank in ranks
        ]
        for name, ranks in values.items()
    }


@recording("plan_search")
def plan_search(folder: Path) -> Any:
    """Layouts of 64 ranks with their memory and speed."""
    found = json.loads(mt("plan", *PLAN, "--search", "--top", "300", "--json"))
    found = found.get("search", found)
    keys = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "gib",
        "estimated_tokens_per_second",
        "recompute_granularity",
    )
    return {
        "legal": found["legal"],
        "fitting": found["fitting"],
        "too_large": found["too_large"],
        "layouts": [{key: _rounded(layout.get(key)) for key in keys} for layout in found["layouts"]],
    }


@recording("run")
def run(folder: Path) -> Any:
    """The run of `mt train` without a configuration."""
    lines = train(folder / "run", {})
    return {
        "train": columns(lines, "loss", "grad_norm", "learning_rate", "tokens_per_second"),
        "valid": columns(lines, "valid_loss", kind="valid"),
    }


SHORT = {"train.train_iters": 120, "checkpoint.save_interval": "null", "train.eval_interval": "null"}
SMALL = {"model.num_layers": 2, "model.hidden_size": 64, "train.micro_batch_size": 8, "data.corpus_bytes": 2000000}


@recording("optimizers")
def optimizers(folder: Path) -> Any:
    """Training loss of the small GPT with each optimizer, its learning rate chosen out of two."""
    found = {}
    for name, rates in (
        ("adam", (3e-3, 1e-2)),
        ("muon", (3e-3, 1e-2)),
        ("lion", (3e-4, 1e-3)),
        ("sgd", (1e-1, 3e-1)),
    ):
        runs = {}
        for rate in rates:
            settings = {
                **SHORT,
                **SMALL,
                "optimizer.optimizer": name,
                "optimizer.lr": rate,
                "optimizer.min_lr": rate / 10,
            }
            runs[rate] = columns(train(folder / f"{name}-{rate}", settings), "loss")["loss"]
        best = min(runs, key=lambda rate: sum(runs[rate][-10:]))
        found[name] = {"lr": best, "loss": runs[best]}
    return found


@recording("instructions")
def instructions(folder: Path) -> Any:
    """Losses of the preset instructions-tiny on training and validation, a value for 10 steps."""
    lines = train(folder, {"logging.log_interval": 10}, "--preset", "instructions-tiny")
    return {"train": columns(lines, "loss"), "valid": columns(lines, "valid_loss", kind="valid")}


@recording("distillation")
def distillation(folder: Path) -> Any:
    """Cross entropy on validation text of gpt-tiny-student by labels alone and by gpt-tiny's distributions."""
    often = {"logging.log_interval": 50}
    train(folder / "teacher", often, "--preset", "gpt-tiny")
    labels = train(folder / "labels", often, "--preset", "gpt-tiny-student")
    settings = [part for key, value in often.items() for part in ("--set", f"{key}={value}")]
    distilled = folder / "distilled"
    mt(
        "tune",
        "distill",
        "gpt-tiny-student",
        "--teacher",
        str(folder / "teacher"),
        "--run-dir",
        str(distilled),
        *settings,
    )
    lines = [json.loads(line) for line in (distilled / "metrics.jsonl").read_text().splitlines()]
    return {
        "labels": columns(labels, "valid_loss", kind="valid"),
        "distilled": columns(lines, "valid_cross_entropy", kind="valid"),
    }


@recording("low_precision")
def low_precision(folder: Path) -> Any:
    """Training losses of the runs of bench/fp8.py in bf16, MXFP8 and NVFP4."""
    kinds = [
        "mxfp8",
        "nvfp4",
        "nvfp4, last layer in bf16",
        "nvfp4, gradients to nearest",
        "nvfp4, no Hadamard transform",
        "nvfp4, weights in rows",
    ]
    out = folder / "curves.json"
    subprocess.run([sys.executable, "bench/fp8.py", "--recipes", *kinds, "--out", str(out)], check=True)
    return json.loads(out.read_text())


SUMS_SFT = [
    "digit-sums", "--no-packing", "--seq-length", "16", "--batch-size", "64", "--micro-batch-size", "64",
    "--steps", "300",
]  # fmt: skip
SUMS_RL = [
    "--reward", "exact_match", "--group-size", "16", "--batch-size", "512", "--micro-batch-size", "128",
    "--steps", "120", "--max-completion-length", "4", "--lr", "6e-4",
]  # fmt: skip


@recording("digit_sums")
def digit_sums(folder: Path) -> Any:
    """Share of right sums, drawn from in training and by the likeliest tokens on those that are held out."""
    subprocess.run([sys.executable, "examples/digit_sums.py", str(folder)], check=True)
    start, run = folder / "sft", folder / "rl"
    mt("tune", "sft", SUMS_SFT[0], str(folder / "careless.jsonl"), *SUMS_SFT[1:], "--run-dir", str(start))
    files = [str(folder / "prompts.jsonl"), "--valid", str(folder / "held-out.jsonl")]
    mt("tune", "grpo", str(start), *files, *SUMS_RL, "--run-dir", str(run))
    return reward_columns(run)


def reward_columns(run: Path) -> Any:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {"train": columns(lines, "reward"), "valid": columns(lines, "valid_reward", kind="valid")}


MOE = {
    "train.train_iters": 50, "checkpoint.save_interval": "null", "train.eval_interval": "null",
    "train.micro_batch_size": 4,
}  # fmt: skip


@recording("moe")
def moe(folder: Path) -> Any:
    """Load of experts under three ways of balancing."""
    kinds = {
        "none": {"model.moe.moe_router_load_balancing_type": '["none"]', "model.moe.moe_aux_loss_coeff": "null"},
        "aux_loss": {},
        "expert bias": {
            "model.moe.moe_router_load_balancing_type": '["none"]', "model.moe.moe_aux_loss_coeff": "null",
            "model.moe.moe_router_enable_expert_bias": "true",
            "model.moe.moe_router_score_function": "sigmoid", "model.moe.moe_router_bias_update_rate": "0.01",
        },
    }  # fmt: skip
    found = {}
    for name, settings in kinds.items():
        lines = train(folder / name.replace(" ", "-"), {**MOE, **settings}, "examples/mixtral-tiny.toml")
        keys = [key for key in lines[0] if key.endswith("load_max_over_mean")]
        found[name] = columns(lines, "loss", *keys)
    return found


@recording("layouts")
def layouts(folder: Path) -> Any:
    """Loss and gradient norm of the first steps in several layouts."""
    settings = {**SHORT, "train.train_iters": 8, "train.micro_batch_size": 2, "train.global_batch_size": 8}
    kinds = {
        "one process": {}, "data 2": {}, "tensor 2": {"parallel.tensor_model_parallel_size": 2},
        "pipeline 2": {"parallel.pipeline_model_parallel_size": 2},
        "context 2": {"parallel.context_parallel_size": 2},
    }  # fmt: skip
    found = {}
    for name, layout in kinds.items():
        ranks = [] if name == "one process" else ["--nproc", "2"]
        lines = train(folder / name.replace(" ", "-"), {**settings, **layout}, *ranks)
        found[name] = {
            key: [line[key] for line in lines if line["kind"] == "train"] for key in ("iteration", "loss", "grad_norm")
        }
    return found


@recording("resume")
def resume(folder: Path) -> Any:
    """A run of 24 steps, and the same stopped after 12 and started again in new processes."""
    base = {**SHORT, "train.train_iters": 24, "checkpoint.save_interval": 12}
    whole = train(folder / "whole", base)
    train(folder / "parts", {**base, "train.exit_iteration": 12})
    parts = train(folder / "parts", base)
    return {
        name: {key: [line[key] for line in lines if line["kind"] == "train"] for key in ("iteration", "loss")}
        for name, lines in (("whole", whole), ("parts", parts))
    }


@recording("checkpoint")
def checkpoint(folder: Path) -> Any:
    """Files of a checkpoint of two tensor-parallel ranks, and what stands in them."""
    settings = {
        **SHORT,
        "train.train_iters": 2,
        "checkpoint.save_interval": 2,
        "parallel.tensor_model_parallel_size": 2,
    }
    train(folder / "run", settings, "--nproc", "2")
    (place,) = (folder / "run" / "checkpoints").glob("iter_*")
    files = {str(path.relative_to(place)): path.stat().st_size for path in sorted(place.rglob("*")) if path.is_file()}
    return {"files": files, "manifest": json.loads((place / "manifest.json").read_text())}


def main(names: list[str]) -> None:
    DATA.mkdir(exist_ok=True)
    for name in names or RECORDINGS:
        with tempfile.TemporaryDirectory() as folder:
            values = RECORDINGS[name](Path(folder))
        (DATA / f"{name}.json").write_text(json.dumps(values) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
