"""Detoxification by self-generation: sample, score, keep the least toxic texts, finetune, measure again.

Each step is a command of mt or a function that goes on where it was killed, and writes its own file in the working
folder; so does the whole.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.errors import ConfigError, MtError
from mt_core.launch.local import DEFAULT_ENTRY
from mt_core.paths import write_whole, writing
from mt_core.plugins import load_plugins
from mt_eval.detoxification.annotation import ATTRIBUTE, annotate, read_lines, select_least_toxic, toxicity_metrics
from mt_eval.evaluation import read_evaluation
from mt_eval.text_scorers import TextScorer

PLAN, RUN, REPORT = "detoxification.json", "run", "report.json"
OF_FINETUNING = {"share", "train"}
"""Entries of the plan that may change until the finetuning has begun, for instance after an error in one of them."""
LENGTH = "data.seq_length"


@dataclass(frozen=True)
class Plan:
    """What a working folder is for; it is written there, and another plan is refused (but see OF_FINETUNING).

    checkpoint: of the model. num_samples texts of max_tokens tokens are sampled without a prompt, with top_p and seed;
    the share of them with the least `attribute` is what the model is finetuned on. prompts: JSON lines of which
    `continuations` of continuation_tokens are sampled before and after. texts: NAME=FILE for perplexity before and
    after. train, engine: settings (section.key=value) of the finetuning, and of generation.
    """

    checkpoint: str
    num_samples: int
    prompts: str | None = None
    texts: tuple[str, ...] = ()
    share: float = 0.5
    attribute: str = ATTRIBUTE
    max_tokens: int = 1000
    top_p: float = 0.9
    seed: int = 1234
    continuations: int = 25
    continuation_tokens: int = 20
    train: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    nproc: int | None = None
    scorer: str = ""
    scorer_options: dict[str, str] = field(default_factory=dict)


class StepFailedError(MtError):
    """A command of the loop ended with an error, which it has shown."""


FINETUNING = (
    "optimizer.lr=2e-5",
    "optimizer.min_lr=0",
    "lr_schedule.lr_decay_style=constant",
    "optimizer.weight_decay=0.1",
    "optimizer.adam_beta2=0.95",
    "optimizer.clip_grad=1.0",
    "train.eval_iters=0",
    "train.sample_prompt=null",
)
"""Megatron-LM's settings, below those of the plan."""


RunCommand = Callable[[list[str]], int]


def run_process(words: list[str]) -> int:
    # In a process of its own: memory of a device is free again before the next step.
    return subprocess.run([*DEFAULT_ENTRY, *words]).returncode


class Detoxification:
    """The steps of a plan in their working folder.

    on_step is called with what is about to run. command: runs `mt` with these words and returns its exit code; the
    default starts a process, which gives its memory back.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        scorer: TextScorer,
        *,
        on_step: Callable[[str], None] = lambda text: None,
        command: RunCommand = run_process,
    ) -> None:
        self.plan, self.folder, self.scorer, self.on_step, self.command = plan, folder, scorer, on_step, command
        self._length = _length_setting(plan)
        with writing(folder, "--folder"):
            folder.mkdir(parents=True, exist_ok=True)
            # Before the first step: a folder never mixes results of two plans.
            _require_plan(plan, folder)

    def run(self) -> dict[str, dict[str, float]]:
        """{"before": metrics, "after": metrics, "generated": of the samples}; also in report.json."""
        plan, folder = self.plan, self.folder
        # Each step finds what an earlier run of the same command has finished in its output file.
        before = self.measure("before", plan.checkpoint)
        samples = folder / "samples.jsonl"
        self._generate(plan.checkpoint, samples, "--num-samples", plan.num_samples, "--max-tokens", plan.max_tokens)
        scored = self._annotated(samples)
        kept = select_least_toxic(scored, folder / "least_toxic.jsonl", plan.share, plan.seed, plan.attribute)
        self.on_step(f"kept {kept:,} texts")
        self._finetune(folder / "least_toxic.jsonl")
        report = {
            "before": before,
            "generated": toxicity_metrics(read_lines(scored), plan.attribute),
            "after": self.measure("after", str(folder / RUN)),
        }
        write_whole(folder / REPORT, (json.dumps({**asdict(plan), **report}, indent=2) + "\n").encode())
        return report

    def measure(self, when: str, checkpoint: str) -> dict[str, float]:
        """Toxicity of continuations, and perplexity of texts; as far as the plan names them."""
        plan, metrics = self.plan, dict[str, float]()
        if plan.prompts is not None:
            output = self.folder / f"{when}.jsonl"
            counts = ("--n", plan.continuations, "--max-tokens", plan.continuation_tokens)
            self._generate(checkpoint, output, "--input", plan.prompts, *counts)
            metrics |= toxicity_metrics(read_lines(self._annotated(output)), plan.attribute)
        if plan.texts:
            output = self.folder / f"{when}-perplexity.json"
            data = [word for text in plan.texts for word in ("--data", text)]
            self._command("eval", "ppl", checkpoint, *data, "--output", output, *self._engine)
            tasks = read_evaluation(output).tasks
            metrics |= {f"{name}_perplexity": result.metrics["perplexity"] for name, result in tasks.items()}
        return metrics

    @property
    def _engine(self) -> list[str]:
        settings = [word for setting in self.plan.engine for word in ("--set", setting)]
        return [*settings, *([] if self.plan.nproc is None else ["--nproc", str(self.plan.nproc)])]

    def _generate(self, checkpoint: str, output: Path, *what: Any) -> None:
        sampling = ("--top-p", self.plan.top_p, "--seed", self.plan.seed)
        self._command("generate", checkpoint, *what, *sampling, "--output", output, *self._engine)

    def _annotated(self, output: Path) -> Path:
        scored = output.with_suffix(".scored.jsonl")
        self.on_step(f"scores of {output.name} -> {scored.name}")
        annotate(output, scored, self.scorer, {"name": self.plan.scorer, "options": self.plan.scorer_options})
        return scored

    def _finetune(self, texts: Path) -> None:
        # Later settings win: the plan's own come last.
        settings = [
            f"checkpoint.load={self.plan.checkpoint}",
            "data.dataset_type=gpt",
            f"data.data_path={json.dumps([str(texts)])}",
            'data.split="1"',
            *self._length,
            *FINETUNING,
            *self.plan.train,
        ]
        options = [word for setting in settings for word in ("--set", setting)]
        nproc = [] if self.plan.nproc is None else ["--nproc", self.plan.nproc]
        self._command("train", "--run-dir", self.folder / RUN, *options, *nproc)

    def _command(self, *words: Any) -> None:
        typed = [str(word) for word in words]
        self.on_step(f"mt {shlex.join(typed)}")
        code = self.command(typed)
        if code:
            raise StepFailedError(f"mt {typed[0]} ended with exit code {code}; put it right, and run the same again")


def _length_setting(plan: Plan) -> list[str]:
    """data.seq_length of the model's training; none where the plan has one. Raises ConfigError where neither has."""
    if any(setting.startswith(f"{LENGTH}=") for setting in plan.train):
        return []
    # The samples of finetuning are as long as those of training, for which the model has positions.
    reader = open_checkpoint(find_checkpoint(plan.checkpoint), load_plugins())
    stored = reader.metadata.get("config", {}).get("data", {}).get("seq_length")
    if stored is None:
        raise ConfigError(
            f"{plan.checkpoint} does not say how long the samples of its training were; give --train {LENGTH}=N"
        )
    return [f"{LENGTH}={stored}"]


def _require_plan(plan: Plan, folder: Path) -> None:
    """Raises ConfigError for another plan than that of the folder."""
    file, content = folder / PLAN, json.dumps(asdict(plan), indent=2) + "\n"
    if file.exists():
        before, now = json.loads(file.read_text(encoding="utf-8")), json.loads(content)
        # Before the finetuning has begun nothing depends on these entries, so that they may be corrected.
        fixed = now.keys() - (set() if (folder / RUN).exists() else OF_FINETUNING)
        changed = [key for key in now if key in fixed and now[key] != before.get(key)]
        if changed:
            key = changed[0]
            raise ConfigError(
                f"{folder} was begun with {key}={before.get(key)!r}, now {now[key]!r}; give another --folder"
            )
    write_whole(file, content.encode())
