"""Runs tasks of lm_eval on a model, resumed where a killed run was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from mt_core.errors import ConfigError, did_you_mean
from mt_core.paths import write_whole
from mt_eval.evaluation import describe_model, describe_run, samples_path
from mt_eval.harness.language_model import HarnessModel, OnAnswer
from mt_eval.tasks import Journal, Sample
from mt_infer.chat.chat_format import ChatFormat, load_chat_format
from mt_infer.text import TextGenerator

SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


@dataclass(frozen=True)
class HarnessOptions:
    """Options of lm_eval.

    tasks: names of tasks and groups, with * for any letters. include_path: a folder with more of them.
    limit: documents of a task, below 1 a share of them. chat_template: a built-in name or a file; `apply_chat_template`
    alone takes the tokenizer's. fewshot_as_multiturn: examples as messages of their own; default: where there is a chat
    template. seed: of examples, of metrics and of texts that are sampled; default: lm_eval's own."""

    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    include_path: Path | None = None
    limit: float | None = None
    apply_chat_template: bool = False
    chat_template: str | None = None
    fewshot_as_multiturn: bool | None = None
    system_instruction: str | None = None
    gen_kwargs: str | None = None
    log_samples: bool = False
    seed: int | None = None
    add_bos: bool | None = None
    bootstrap_iters: int = 100_000
    confirm_run_unsafe_code: bool = False

    @property
    def has_chat(self) -> bool:
        return self.apply_chat_template or self.chat_template is not None

    @property
    def seeds(self) -> dict[str, int]:
        return {} if self.seed is None else dict.fromkeys(SEEDS, self.seed)


def run_harness(
    generator: TextGenerator,
    checkpoint: str | Path,
    options: HarnessOptions,
    *,
    output: Path | None = None,
    on_answer: OnAnswer = lambda kind, done, total: None,
) -> dict[str, Any]:
    """lm_eval's results, with "provenance" and "n-truncated" (task -> documents of which the model was given a part).
    On rank 0, while other ranks `follow`.

    output: the result file. Samples are written beside it as those of other evaluations, and answers of the model as
    soon as they are there, so that a killed run goes on. Raises ConfigError for tasks that do not exist, and DataError
    for an output of another evaluation.
    """
    manager = TaskManager(include_path=None if options.include_path is None else str(options.include_path))
    tasks = _matched(manager, options.tasks)
    chat = _chat_format(generator, options)
    model = describe_model(checkpoint, generator.config)
    # Only what decides an answer: other tasks or metrics may use the answers of the same journal.
    described = {"model": model, "requests": _decisive(options, None if chat is None else chat.source)}
    requests = None if output is None else output.with_suffix(".requests.jsonl")
    with Journal(requests, described) as journal:
        language_model = HarnessModel(
            generator, journal, chat=chat, add_bos=options.add_bos, seed=options.seed or 0, on_answer=on_answer
        )
        # chat holds a process, in which its template runs.
        try:
            results = _simple_evaluate(language_model, manager, tasks, options)
        finally:
            if chat is not None:
                chat.close()
    run = describe_run(str(generator.ctx.device))
    logged = results.pop("samples")
    results["n-truncated"] = {task: len(language_model.truncated[task]) for task in logged}
    results["provenance"] = {**model, **run, **described["requests"], "system_instruction": options.system_instruction}
    if output is not None:
        _write_samples(samples_path(output), model, logged, results, options.log_samples)
        content = json.dumps(results, indent=2, ensure_ascii=False, default=handle_non_serializable)
        # Last: a result file stands for a complete evaluation.
        write_whole(output, (content + "\n").encode())
    return results


def _matched(manager: TaskManager, patterns: Sequence[str]) -> list[str]:
    """Names of tasks. Raises ConfigError for a name or pattern without one."""
    for pattern in patterns:
        if not manager.match_tasks([pattern]):
            hint = did_you_mean(pattern, manager.all_tasks)
            raise ConfigError(
                f"--tasks {pattern}{hint}: no task of lm_eval, and none in the folder of --include-path (lm_eval ls "
                "tasks lists its own)"
            )
    return manager.match_tasks(list(patterns))


def _chat_format(generator: TextGenerator, options: HarnessOptions) -> ChatFormat | None:
    if not options.has_chat:
        if options.fewshot_as_multiturn:
            raise ConfigError("--fewshot-as-multiturn makes messages, for which --apply-chat-template is needed")
        return None
    chat_format = load_chat_format(options.chat_template, generator.tokenizer, generator.config.data)
    if chat_format is None:
        raise ConfigError("--apply-chat-template: the model has none; name one with --chat-template (a name or a file)")
    return chat_format


def _decisive(options: HarnessOptions, chat_template: str | None) -> dict[str, Any]:
    """What decides an answer beside the request."""
    digest = None if chat_template is None else sha256(chat_template.encode()).hexdigest()
    return {"chat_template_hash": digest, "add_bos": options.add_bos, "seed": options.seed}


def _simple_evaluate(
    model: HarnessModel, manager: TaskManager, tasks: list[str], options: HarnessOptions
) -> dict[str, Any]:
    is_multiturn = options.has_chat if options.fewshot_as_multiturn is None else options.fewshot_as_multiturn
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        bootstrap_iters=options.bootstrap_iters,
        system_instruction=options.system_instruction,
        apply_chat_template=options.has_chat,
        fewshot_as_multiturn=is_multiturn,
        gen_kwargs=options.gen_kwargs,
        confirm_run_unsafe_code=options.confirm_run_unsafe_code,
        **options.seeds,
    )
    return results


def _write_samples(
    path: Path,
    model: Mapping[str, Any],
    logged: Mapping[str, Sequence[Mapping[str, Any]]],
    results: Mapping[str, Any],
    with_details: bool,
) -> None:
    """In place of those of an earlier run: answers are what it goes on from."""
    path.unlink(missing_ok=True)
    settings = {task: _settings(task, documents, results) for task, documents in logged.items()}
    with Journal(path, {"model": model, "tasks": settings}) as journal:
        for task, documents in logged.items():
            for sample in samples_of(documents, with_details):
                journal.add(task, sample)


def _settings(task: str, documents: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> dict[str, Any]:
    # lm_eval's hash of each document: equal for two models on the same documents.
    digest = sha256("".join(document["doc_hash"] for document in documents).encode()).hexdigest()
    return {"task": "harness", "data_hash": digest, "num_fewshot": results["n-shot"].get(task)}


# -- samples, from what lm_eval logs of a document ---------------------------------------------------

BYTES, LOG_LIKELIHOOD = "byte_perplexity", "log_likelihood"
DETAILS = ("doc", "target", "arguments", "resps", "filtered_resps")


def samples_of(logged: Iterable[Mapping[str, Any]], with_details: bool) -> list[Sample]:
    """One for each document; of its metrics those that are numbers, under the names of the results ("acc,none").

    Of a text whose byte perplexity is measured: log_likelihood of a byte, weighted by the number of bytes. logged: an
    entry for each document and filter.
    """
    by_document: dict[int, Sample] = {}
    for entry in logged:
        number = entry["doc_id"]
        values, weight = _values(entry)
        # One entry per filter; the values of a document's filters are put together.
        before = by_document.get(number)
        details = _details(entry) if with_details else {}
        by_document[number] = Sample(
            f"document {number}",
            {**(before.values if before else {}), **values},
            weight,
            details={**(before.details if before else {}), **details},
        )
    return list(by_document.values())


def _values(entry: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    """Metrics, and the sample's weight."""
    kept, weight = {}, 1.0
    for metric in entry["metrics"]:
        value = entry[metric]
        # Others are intermediate values, such as (log-likelihood, bytes), that lm_eval aggregates itself.
        if isinstance(value, Real):
            kept[f"{metric},{entry['filter']}"] = float(value)
        elif metric == BYTES:
            log_likelihood, num_bytes = value
            # Per byte, with the bytes as weight: the weighted mean is the corpus' value.
            kept[LOG_LIKELIHOOD], weight = log_likelihood / num_bytes, float(num_bytes)
    return kept, weight


def _details(entry: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values."""
    return {
        entry["filter"]: json.loads(json.dumps({key: entry[key] for key in DETAILS}, default=handle_non_serializable))
    }
