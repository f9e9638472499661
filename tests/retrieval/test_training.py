"""Supervised training: samples, data-parallel ranks, a BERT as the start, and negatives that are mined meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.retrieval.conftest import Trained, training_config
from tests.retrieval.corpus import PASSAGES, TRAINED, World

from mt_core.config.loading import load_config
from mt_core.data.building import counts_tokens
from mt_core.errors import ConfigError, DataError, TrainingError
from mt_core.interfaces import SplitRequest
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer
from mt_data.tokenizers.bert_wordpiece import BertWordPieceConfig, build_bert_wordpiece
from mt_retrieval.dpr import Context, DPRDataConfig, MinedNegatives, RefreshConfig, build_dpr, mined_file
from mt_retrieval.encoder import Encoder
from mt_retrieval.refresh import Mining, RefreshNegatives, build_refresh


def dataset(world: World, split="train", **keys):
    config = DPRDataConfig.model_validate(
        {
            "seq_length": 16,
            "train_data_path": [str(world.folder / "train.json")],
            "valid_data_path": [str(world.folder / "dev.json")],
            **keys,
        }
    )
    tokenizer = build_bert_wordpiece(BertWordPieceConfig(vocab_file=str(world.folder / "vocab.txt")))
    return build_dpr(config, tokenizer, SplitRequest(split, 2 * TRAINED, 16, 3)), tokenizer


@pytest.mark.parametrize(("dataset_type", "tokens"), [("dpr", False), ("ict", False), ("mock", True)])
def test_the_speed_of_pairs_is_not_in_tokens(dataset_type: str, tokens: bool) -> None:
    config: Any = SimpleNamespace(data=SimpleNamespace(dataset_type=dataset_type))
    assert counts_tokens(config, load_plugins()) is tokens


def passage_ids(world: World, tokenizer, number: int) -> list[int]:
    special = tokenizer.special
    ids = [*tokenizer.encode(world.titles[number]), special.sep, *tokenizer.encode(world.texts[number])]
    return [special.cls, *ids, special.sep]


@pytest.mark.slow
def test_a_sample_has_the_question_its_passage_and_negatives(world: World) -> None:
    found, tokenizer = dataset(world, train_hard_neg=4)
    records = {one["question"]: one for one in json.loads((world.folder / "train.json").read_text())}
    seen = set()
    for index in range(2 * TRAINED):
        record = records[found.questions[found.order[index]].question]
        sample = found[index]
        texts = [
            row[: int(mask.sum())].tolist()
            for row, mask in zip(sample["context_tokens"], sample["context_padding_mask"], strict=True)
        ]
        numbers = {
            key: [int(one["passage_id"]) - 1000 for one in record[key]]
            for key in ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs")
        }
        expected = {key: [passage_ids(world, tokenizer, number) for number in value] for key, value in numbers.items()}
        present = 2 + len(numbers["negative_ctxs"])
        assert texts[0] == expected["positive_ctxs"][0]
        assert texts[1] == expected["hard_negative_ctxs"][0]  # the only hard one, then others
        assert sorted(texts[2:present]) == sorted(expected["negative_ctxs"])
        assert sample["context_mask"].tolist() == [1] * present + [0] * (5 - present)
        question = [tokenizer.special.cls, *tokenizer.encode(record["question"][:-1]), tokenizer.special.sep]
        assert sample["query_tokens"][: len(question)].tolist() == question
        assert sample["query_padding_mask"].sum() == len(question)
        seen.add(tuple(texts[2]) == tuple(expected["negative_ctxs"][0]))
    assert seen == {True, False}  # drawn anew for each sample
    again = dataset(world, train_hard_neg=4)[0]
    for name, value in again[7].items():
        np.testing.assert_array_equal(value, found[7][name])


def test_long_passages_are_cut_before_the_last_separator(world: World) -> None:
    pairs = dataset(world)[0].pairs
    assert pairs.passage([9] * 3, [8] * 30) == [2, 9, 9, 9, 3, *[8] * 10, 3]
    assert pairs.question([7] * 30) == [2, *[7] * 14, 3]


@pytest.mark.parametrize(
    ("keys", "content", "error", "words"),
    [
        ({"train_hard_neg": 5}, None, DataError, r"train_hard_neg=5, and no question of .* more than 4 .* set it to 4"),
        ({"refresh": {"evidence": "a", "questions": "b", "folder": "c"}}, None, ValueError, r"train_hard_neg=0 uses"),
        ({}, "[1]", DataError, r"question 1 must be an object with question and positive_ctxs"),
        ({}, '[{"question": "a"}]', DataError, r"question 1 has no positive_ctxs; its keys are question"),
        ({}, '[{"question": "a", "positive_ctxs": []}]', DataError, r"has no question with a passage"),
        ({}, '[{"question": "a", "positive_ctxs": [{"text": "b"}]}]', DataError, r"positive_ctxs 1 must have a title"),
        ({}, '[{"question": 1, "positive_ctxs": []}, {"question": 2, "positive_ctxs": [1]}]', DataError, r"a text"),
        ({}, "{", DataError, r"is no JSON array or JSON lines"),
        ({}, "", DataError, r"has no question with a passage"),
    ],
)
def test_data_that_cannot_be_trained_on(world: World, tmp_path: Path, keys, content, error, words: str) -> None:
    path = world.folder / "train.json"
    if content is not None:
        path = tmp_path / "train.json"
        path.write_text(content)
    with pytest.raises(error, match=words):
        dataset(world, train_data_path=[str(path)], **keys)


# -- ranks -----------------------------------------------------------------------------------------


class Curve(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step_end(self, run, metrics) -> None:
        self.values += [metrics["loss"], metrics["grad_norm"]]

    def on_evaluation(self, run, metrics) -> None:
        self.values += [value for name, value in metrics.items() if name != "iteration"]


def curve(rank: int, ranks: int, world: World) -> list[float]:
    found = Curve()
    size = [f"train.micro_batch_size={12 // ranks}", "train.global_batch_size=24", "train.train_iters=3"]
    Trainer(training_config(world, *size), callbacks=[found]).train()
    return found.values


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_train_and_validate_as_one_process(world: World) -> None:
    alone = curve(0, 1, world)
    assert len(alone) == 3 * 2 + 5
    parts = run_ranks(2, curve, world)
    assert parts[0] == pytest.approx(alone, rel=2e-5)


# -- a BERT as the start ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(3)
    vocabulary = (world.folder / "vocab.txt").read_text()
    config = transformers.BertConfig(
        vocab_size=len(vocabulary.split()),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    transformers.BertForPreTraining(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text(vocabulary)
    return folder


TOWERS = [
    "model.num_layers=2",
    "model.layernorm_placement=post",
    "model.norm_epsilon=1e-12",
    "model.use_scaled_init_method=false",
]


@pytest.mark.parametrize("shared", [True, False])
def test_every_tower_starts_from_a_bert(world: World, bert: Path, tmp_path: Path, shared: bool) -> None:
    """The vector of a question is transformers' own state of its first position; one step of rate 0 changes nothing."""
    import transformers

    settings = [
        *TOWERS,
        f"model.biencoder_shared_query_context_model={str(shared).lower()}",
        f"checkpoint.load={bert}",
        "train.train_iters=1",
        "optimizer.lr=0",
        "optimizer.min_lr=0",
    ]
    Trainer(training_config(world, *settings), run_dir=tmp_path, valid_data={}).train()
    encoder = Encoder.load(tmp_path, device="cpu")
    reference = transformers.BertModel.from_pretrained(bert).eval()
    question = "kab lod mif"
    ids = [2, *encoder.tokenizer.encode(question), 3]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).last_hidden_state[0, 0].numpy()
    np.testing.assert_allclose(encoder.questions([question + "?"])[0], expected, atol=1e-5)
    np.testing.assert_allclose(encoder.vectors([ids], "document")[0], expected, atol=1e-5)


def test_a_bert_that_computes_something_else_is_refused(world: World, bert: Path) -> None:
    settings = [*TOWERS[:1], f"checkpoint.load={bert}"]
    with pytest.raises(
        ConfigError, match=r"other keys than the towers: set model.layernorm_placement=post \(now pre\)"
    ):
        Trainer(training_config(world, *settings))


def test_presets_of_megatrons_and_the_original_bert_fit() -> None:
    for name in ("ict-base", "ict-bert-base-uncased", "dpr-bert-base-uncased", "ict-tiny", "dpr-tiny"):
        config = load_config(preset=name, overrides=["train.train_iters=1"]).config
        assert config.model.retriever_report_topk_accuracies[0] == 1


# -- negatives that are mined meanwhile ------------------------------------------------------------


@pytest.mark.slow
def test_negatives_are_mined_from_a_checkpoint_and_used_later(trained: Trained, tmp_path: Path) -> None:
    """They are among the passages with the highest scores by the checkpoint, and none answers its question."""
    world, folder = trained.world, tmp_path / "negatives"
    refresh = {"evidence": world.passages, "questions": world.folder / "train.json", "folder": folder}
    settings = [f'data.refresh.{key}="{value}"' for key, value in refresh.items()]
    settings += ["data.refresh.negatives=3", "data.refresh.in_background=false", "data.refresh.every_checkpoints=2"]
    size = ["train.train_iters=6", "train.micro_batch_size=4", "checkpoint.save_interval=2"]
    trainer = Trainer(training_config(world, *size, *settings), run_dir=tmp_path / "run", valid_data={})
    trainer.train()
    data, config = trainer.train_data, trainer.config.data
    first = 4 * (4 + 2 + (config.prefetch_batches if config.num_workers else 0))
    assert [path.name for path in folder.glob("mined-*")] == [f"mined-{first:012}.json"]
    mined = {one["question"]: one for one in json.loads((folder / f"mined-{first:012}.json").read_text())}
    assert len(mined) == TRAINED
    encoder = Encoder.load(tmp_path / "run/checkpoints/iter_0000004", device="cpu")
    sequences = [passage_ids(world, encoder.tokenizer, number) for number in range(PASSAGES)]
    passages = encoder.vectors(sequences, "document")
    for question in list(mined)[:20]:
        best = np.argsort(-(passages @ encoder.questions([question])[0])).tolist()
        found = [int(one["passage_id"]) - 1000 for one in mined[question]["hard_negative_ctxs"]]
        assert len(found) == 3
        assert int(mined[question]["answers"][0].split()[1]) not in found
        assert set(found) <= set(best[:6])  # fp16 may exchange neighbours
    for index, is_mined in ((first - 1, False), (first, True)):
        question = data.questions[data.order[index]]
        ids = {one["passage_id"] for one in mined[question.question]["hard_negative_ctxs"]}
        assert (data.negatives(index)[0].id in ids) is is_mined


def test_a_file_that_was_mined_again_is_read_again(tmp_path: Path) -> None:
    for number in range(2):
        context = {"title": "t", "text": f"passage {number}"}
        question = {"question": "q", "answers": ["a"], "positive_ctxs": [context], "hard_negative_ctxs": [context]}
        mined_file(tmp_path, 0).write_text(json.dumps([question]))
        os.utime(mined_file(tmp_path, 0), (number, number))
        assert MinedNegatives(tmp_path).of_sample(3, "q", ()) == (Context("t", f"passage {number}"),)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.refresh.evidence=none.tsv"], r"data.refresh.evidence=none.tsv: no such file"),
        (["data.refresh.questions=none.json"], r"data.refresh.questions=none.json: no such file"),
        ([], r"mines from checkpoints while training runs, and checkpoint.save_interval is null"),
        (
            ["checkpoint.save_interval=2", "checkpoint.keep_last=1"],
            r"reads a checkpoint while training continues, and checkpoint.keep_last=1 removes it",
        ),
    ],
)
def test_mining_that_could_never_work_is_refused(world: World, settings: list[str], words: str) -> None:
    refresh = [f"data.refresh.evidence={world.passages}", f"data.refresh.questions={world.folder}/train.json"]
    config = training_config(world, *refresh, "data.refresh.folder=mined", *settings).config
    with pytest.raises(ConfigError, match=words):
        build_refresh(config)


def test_negatives_of_another_run_are_refused(world: World, tmp_path: Path) -> None:
    refresh = RefreshConfig(evidence="a", questions="b", folder=str(tmp_path))
    callback = RefreshNegatives(refresh, training_config(world).config)
    new, resumed = SimpleNamespace(resumed_from=None), SimpleNamespace(resumed_from=tmp_path)
    callback.on_train_start(new)
    (tmp_path / "mined-000000000064.json").write_text("[]")
    callback.on_train_start(resumed)
    with pytest.raises(ConfigError, match=r"has negatives that another run has mined; give another folder, or remove"):
        callback.on_train_start(new)


def test_a_failure_of_mining_in_the_background_ends_training(world: World, tmp_path: Path) -> None:
    refresh = RefreshConfig(evidence="a", questions="b", folder=str(tmp_path))
    callback = RefreshNegatives(refresh, training_config(world).config)
    log = tmp_path / "mining.log"
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit('a reason')"], stderr=file)
    callback._mining = Mining(tmp_path / "iter_0000002", tmp_path / "mined.json", log, process)
    process.wait()
    with pytest.raises(
        TrainingError, match=r"mining hard negatives with .*iter_0000002 failed: a reason \(all of it: "
    ):
        callback.on_step_end(None, {})
    callback.close()
