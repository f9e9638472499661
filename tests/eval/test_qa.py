"""docs/guides/retro.md and instruct-retro.md: facts that only a database has lower perplexity and answer questions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.built_once import built_once
from tests.docs.blocks import ROOT, blocks, mt_commands

from mt_cli import main
from mt_core.data.building import build_datasets
from mt_core.plugins import load_plugins
from mt_eval.metrics.texts import exact_match
from mt_eval.qa import QuestionAnswering, f1_of_first, prediction_of
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

RETRO, INSTRUCT = "docs/guides/retro.md", "docs/guides/instruct-retro.md"
QUIET = ["--set", "logging.progress=none", "--set", "train.num_threads=1", "--set", "train.eval_interval=null"]
BOUND = 8 * math.log(26) / 32
"""Loss of a token of the text without a database: of 32, four letters of a name and four of a code are random."""
MADE_BY = ("mt data preprocess", "mt retro build facts", "mt train")
long = pytest.mark.long


def words(page: str, *beginnings: str) -> list[list[str]]:
    """The words after `mt` of the page's commands that begin with one of these."""
    return [one.words for one in mt_commands() if one.block.page == page and one.text.startswith(beginnings)]


def snippets(page: str) -> list[str]:
    return [block.text for block in blocks() if block.page == page and block.language == "python"]


def run_pages(folder: Path) -> None:
    """Data and runs of both pages."""
    (folder / "examples").symlink_to(ROOT / "examples")
    with chdir(folder):
        script: dict[str, Any] = {"__name__": "facts_data"}
        exec(compile((ROOT / "examples/facts_data.py").read_text(), "facts_data.py", "exec"), script)
        script["main"](Path("facts"))
        for command in [*words(RETRO, *MADE_BY), *words(INSTRUCT, "mt train")]:
            assert main.run([*command, *(QUIET if command[0] == "train" else [])]) == 0


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = built_once(request, "facts", run_pages)
    with chdir(folder):
        yield folder


def measured(capsys, command: Sequence[str], *options: str) -> dict[str, dict[str, float]]:
    """Metrics of each task of a command of mt eval."""
    capsys.readouterr()
    assert main.run([*command, *options, "--json"]) == 0
    return {name: task["metrics"] for name, task in json.loads(capsys.readouterr().out)["tasks"].items()}


@long
def test_neighbours_lower_the_perplexity_of_facts_that_only_the_database_has(folder: Path, capsys) -> None:
    """Below what is possible without them; neighbours of other chunks and none stay above. The losses of the engine are
    those of validation during training."""
    share_found, random_neighbors, _ = snippets(RETRO)
    capsys.readouterr()
    exec(share_found)
    assert capsys.readouterr().out == "1.0\n"
    exec(random_neighbors)
    of_gpt, command, of_others = words(RETRO, "mt eval ppl")
    found = measured(capsys, command, "--limit", "64")
    (plain,) = measured(capsys, of_gpt, "--limit", "64").values()
    (other,) = measured(capsys, of_others, "--limit", "64").values()
    assert BOUND - 0.01 < plain["loss"] < 1.1 * BOUND
    assert found["valid"]["loss"] < 0.7 * BOUND
    assert found["valid without neighbors"]["loss"] > BOUND - 0.01
    assert other["loss"] > BOUND - 0.01
    trained = {}
    for line in (folder / "runs/retro/metrics.jsonl").read_text().splitlines():
        trained |= json.loads(line)
    assert found["valid"]["loss"] == pytest.approx(trained["valid_loss"], rel=1e-5)
    assert found["valid without neighbors"]["loss"] == pytest.approx(trained["valid_loss_without_neighbors"], rel=1e-5)


@long
def test_questions_are_answered_with_passages_and_not_without(folder: Path, capsys) -> None:
    command = words(INSTRUCT, "mt eval qa runs/instruct --data facts")[0]
    found = measured(capsys, command, "--limit", "60")
    assert found["qa"]["exact_match"] == found["qa"]["f1"] == found["qa"]["f1_of_first"] > 0.9
    assert found["qa without passages"]["exact_match"] < 0.05
    # A killed run goes on where it was.
    samples = folder / "qa.samples.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:30]) + lines[30][:20])
    assert measured(capsys, command, "--limit", "60") == found
    assert samples.read_text() == "".join(lines)
    # Any decoder answers, with passages in its prompt.
    of_gpt = ["eval", "qa", "runs/gpt", "--data", "facts/test.jsonl", "--max-tokens", "4"]
    plain = measured(capsys, of_gpt, "--limit", "2")
    assert plain["qa"]["exact_match"] == 0


@long
def test_a_line_of_mt_generate_brings_passages(folder: Path) -> None:
    record = {
        "prompt": "User: What is the code of MINE?\n\nAssistant:",
        "passages": ["Entry of MINE in the list: gold."],
    }
    page = [line for block in blocks() if block.page == INSTRUCT for line in block.text.splitlines()]
    assert f"printf '%s\\n' '{json.dumps(record)}' > mine.jsonl" in page
    other = {**record, "passages": ["Entry of MINE in the list: jade."]}
    chunks = {"prompt": "Code of MINE is:", "neighbors": [other["passages"]], "max_tokens": 6}
    wrong = [{**record, "passages": "one"}, {**chunks, "passages": []}]
    (folder / "mine.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (record, other, chunks, *wrong)))
    assert main.run(words(INSTRUCT, "mt generate")[0]) == 0
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [one["completions"][0]["text"] for one in answers[:3]] == [" gold", " jade", " jade"]
    assert '"passages" must be a list' in answers[3]["error"]
    assert 'either "neighbors" (of each chunk) or "passages"' in answers[4]["error"]


class Library:
    """Implements mt_retrieval.passage_retrievers.PassageRetriever: finds the sentence with the name of the question."""

    def __init__(self, folder: Path) -> None:
        self.found: dict[str, str] = {}
        for line in (folder / "facts/test.jsonl").read_text().splitlines():
            record = json.loads(line)
            self.found[record["question"]] = record["passages"][0]

    def passages(self, questions: Sequence[str], k: int) -> list[list[tuple[str, str]]]:
        return [[("", self.found[question])][:k] for question in questions]

    def description(self) -> dict[str, str]:
        return {"retriever": "library"}


@long
def test_prompts_are_those_of_training_and_passages_may_be_retrieved(folder: Path) -> None:
    """The forward pass over the sample that the data set makes of a record has the answer that the engine generates."""
    generator = TextGenerator.load("runs/instruct", device="cpu")
    config, host = generator.config, load_plugins()
    dataset = build_datasets(config, generator.tokenizer, "valid", host)["valid"]
    bare = [json.loads(line) for line in Path("facts/test.jsonl").read_text().splitlines()[:8]]
    # As DPR's files of Natural Questions.
    Path("bare.csv").write_text("".join(f"{record['question']}\t{record['answers']}\n" for record in bare))
    greedy = SamplingParameters(temperature=0.0, max_tokens=8)
    task = QuestionAnswering(["bare.csv"], generator, keys={}, sampling=greedy, retriever=Library(folder), top_k=1)
    measured = list(task.samples(generator, 0))
    places = {dataset.describe(index).partition(", ")[2]: index for index in range(len(dataset))}
    for sample, record in zip(measured, bare, strict=True):
        trained = dataset[places[sample.name.partition(", ")[2]]]
        batch = {name: torch.from_numpy(trained[name])[None] for name in generator.model.inputs}
        with torch.no_grad():
            logits = generator.model(**batch)[0]
        predicted = logits.argmax(-1)[torch.from_numpy(trained["loss_mask"]) > 0].tolist()
        text = bytes(token for token in predicted if token < 256).decode()
        assert exact_match(text, [sample.details["prediction"]]) == 1
        assert record["answers"][0] in text or sample.values["exact_match"] == 0
    assert task.metrics(measured)["exact_match"] > 0.8
    assert task.settings["retriever"] == {"retriever": "library", "top_k": 1}
    generator.close()


def test_answers_are_compared_by_megatrons_rules() -> None:
    """By hand."""
    assert prediction_of("Answer: The U.S.\nof America ") == "The U.S. of America"
    assert prediction_of("A: Rome") == "Rome"
    assert prediction_of("A good one") == "A good one"
    # Deleted punctuation: "us"; separating punctuation: "u", "s".
    assert exact_match("the U.S.", ["US"]) == 1.0
    assert f1_of_first("the U.S.", ["US"]) == 0.0
    assert f1_of_first("big red dog", ["a red, red cat", "big red dog"]) == pytest.approx(2 * 1 / (3 + 3))
    assert f1_of_first("", ["word"]) == 0.0
    assert f1_of_first("word", ["no_passages_used"]) is None


def test_data_without_neighbours_cannot_lose_them(mt) -> None:
    outcome = mt("train", "--set", "eval.without_neighbors=true", "--set", "train.train_iters=1")
    assert "samples of data.dataset_type=builtin have no neighbours; remove the key" in " ".join(outcome.err.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ppl"], "there is nothing to measure; give texts with --data, or --split"),
        (["ppl", "--split", "dev"], "--split dev: it can be train, valid, test"),
        (["ppl", "--data", "a.txt", "--without-neighbors"], "--without-neighbors is of --split"),
        (["ppl", "--split", "valid", "--without-neighbors"], "data.dataset_type=builtin have no neighbours"),
        (["qa", "--data", "none.jsonl"], "'none.jsonl' matches no file"),
        (["qa", "--data", "x.jsonl", "--retriever", "index", "--retriever-option", "path"], "give KEY=VALUE"),
        (["qa", "--data", "x.jsonl", "--retriever", "none"], "--retriever=none"),
        (["qa", "--data", "x.jsonl", "--retriever-option", "path=x"], "name it with --retriever"),
        (["qa", "--data", "x.jsonl", "--top-k", "3"], "name it with --retriever"),
    ],
)
def test_what_cannot_be_measured_is_named(model: Path, mt, arguments, words) -> None:
    outcome = mt("eval", arguments[0], model, *arguments[1:])
    assert outcome.code in (2, 3, 4), outcome.err
    assert words in " ".join(outcome.err.split())
