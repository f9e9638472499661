"""Models that begin with the weights of another one, through `mt train`: BERT to a classifier, GPT to RETRO."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from mt_cli import main
from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.config.loading import load_config
from mt_core.train import Trainer
from mt_core.train.checkpoint.state import MODEL
from mt_core.train.trained_model import load_trained_model

QUICK = [
    "train.train_iters=2",
    "train.micro_batch_size=2",
    "train.eval_iters=1",
    "train.num_threads=1",
    "lr_schedule.lr_decay_style=constant",
    "logging.progress=none",
]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "?"]
BERT = [
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.max_position_embeddings=16",
    "model.activation=gelu",  # the default preset's is another
    "data.seq_length=16",
    "tokenizer.tokenizer_type=BertWordPieceLowerCase",
]
GPT = [
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.position_embedding_type=rope",
    "data.seq_length=32",
    "data.corpus_bytes=300000",
]
LLAMA = ["model.family=llama", *(key for key in GPT if "embedding_type" not in key)]
RETRO = [
    "model.family=retro",
    "model.retro_chunk_length=32",
    "model.retro_cross_attention_layers=[2]",
    "data.dataset_type=builtin_retro",
    "data.retro_chunk_length=32",
    "data.seq_length=32",
    "data.corpus_bytes=300000",
]


def train(folder: Path, name: str, options: list[str]) -> int:
    settings = [part for option in [*QUICK, *options] for part in ("--set", option)]
    return main.run(["train", *settings, "--run-dir", str(folder / name)])


def weights(host, folder: Path) -> dict[str, torch.Tensor]:
    reader = open_checkpoint(find_checkpoint(folder), host)
    return {n.removeprefix(MODEL): reader.read(n) for n in reader.shapes() if n.startswith(MODEL)}


class MaskedWords:
    """Samples of BERT_SAMPLE."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.full(16, 5 + index, np.int64)
        mask = (np.arange(16) == 3).astype(np.float32)
        same = {"tokentype_ids": np.zeros(16, np.int64), "padding_mask": np.ones(16, np.int64)}
        return {"tokens": tokens, "labels": tokens, "loss_mask": mask, "is_random": np.array(index % 2), **same}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, host) -> Path:
    """A folder with a BERT (bert), a GPT (gpt), a vocabulary and a table of pairs."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    columns = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
    rows = [[str(n), "1", "2", f"a b {'c' * n}?", "d e?", str(n % 2)] for n in range(8)]
    (folder / "pairs.tsv").write_text("\n".join("\t".join(row) for row in [columns, *rows]) + "\n")
    keys = [*QUICK, *BERT, f"tokenizer.vocab_file={folder / 'vocab.txt'}", "model.family=bert", "train.loss=bert"]
    config = load_config(overrides=keys, host=host)
    Trainer(config, run_dir=folder / "bert", host=host, train_data=MaskedWords(), valid_data={}).train()
    assert train(folder, "gpt", ["model.family=gpt", *GPT]) == 0
    return folder


def classifier(folder: Path, *options: str) -> list[str]:
    return [
        *BERT,
        f"tokenizer.vocab_file={folder / 'vocab.txt'}",
        "model.family=bert_classification",
        "data.dataset_type=qqp",
        f'data.train_data_path=["{folder / "pairs.tsv"}"]',
        "train.loss=classification",
        f"checkpoint.load={folder / 'bert'}",
        *options,
    ]


MISSING = 'checkpoint.load_missing=["classification_head.*"]'
STILL = ["optimizer.lr=1e-9", "optimizer.min_lr=0"]
IGNORED = 'checkpoint.load_ignored=["lm_head.*", "output_layer.*", "binary_head.*"]'


def test_a_bert_becomes_a_classifier(pretrained, tmp_path, host) -> None:
    assert train(tmp_path, "qqp", classifier(pretrained, *STILL)) == 0
    said = (tmp_path / "qqp" / "log.txt").read_text()
    assert "not taken from the checkpoint: binary_head.bias, binary_head.weight, lm_head.dense.bias" in said
    assert "with their initial values: classification_head.weight, classification_head.bias" in said
    before, after = weights(host, pretrained / "bert"), weights(host, tmp_path / "qqp")
    shared = before.keys() & after.keys()
    assert after.keys() - shared == {"classification_head.weight", "classification_head.bias"}
    assert {name.partition(".")[0] for name in before.keys() - shared} == {"lm_head", "output_layer", "binary_head"}
    for name in shared:  # two steps of a learning rate of nothing
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            [MISSING, "checkpoint.load={folder}/gpt"],
            [
                "encoder.layers.0.input_layernorm.weight is missing",
                "keeps its initial values in checkpoint.load_missing",
            ],
        ),
        (
            [MISSING, IGNORED.replace("lm_head", "lm_haed")],
            ['checkpoint.load_ignored has "lm_haed.*", which fits no ten'],
        ),
        ([MISSING.replace("head", "haed"), IGNORED], ['"classification_haed.*", which fits no parameter of the model']),
        (
            [MISSING, IGNORED, "model.ffn_hidden_size=32"],
            ["linear_fc1.weight has shape [64, 16] in the checkpoint, [32"],
        ),
    ],
)
def test_any_other_difference_is_an_error(pretrained, tmp_path, capsys, options, words) -> None:
    options = [option.format(folder=pretrained) for option in options]
    assert train(tmp_path, "qqp", classifier(pretrained, *options)) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert all(word in said for word in words), said
    assert not (tmp_path / "qqp" / "checkpoints").exists()


def test_a_parameter_that_may_be_missing_and_is_there_is_loaded(pretrained, tmp_path, host) -> None:
    options = [MISSING.replace("]", ', "pooler.*"]'), IGNORED, *STILL]
    assert train(tmp_path, "qqp", classifier(pretrained, *options)) == 0
    before, after = weights(host, pretrained / "bert"), weights(host, tmp_path / "qqp")
    torch.testing.assert_close(after["pooler.dense.weight"], before["pooler.dense.weight"], rtol=0, atol=1e-7)


@pytest.mark.slow
def test_retro_fitting_trains_what_a_gpt_does_not_have(pretrained, tmp_path, host) -> None:
    """Borgeaud et al., section 4.2: the weights of the GPT stay, bit for bit."""
    frozen = ["model.retro_freeze_gpt=true", f"checkpoint.load={pretrained / 'gpt'}"]
    assert train(tmp_path, "retro", [*RETRO, *frozen]) == 0
    before, after = weights(host, pretrained / "gpt"), weights(host, tmp_path / "retro")
    assert all(torch.equal(after[name], before[name]) for name in before)
    added = after.keys() - before.keys()
    assert {name.partition(".")[0] for name in added} == {"encoder", "decoder"}
    assert not (after["decoder.layers.1.pre_cross_attn_layernorm.weight"] == 1).all(), "what is new is trained"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_retro_begins_as_the_decoder_that_it_is_made_of(pretrained, tmp_path, host, family) -> None:
    """Its shape, its weights and, without neighbours, its loss."""
    if family == "llama":
        assert (
            train(tmp_path, "llama", ["model.family=llama", *(key for key in GPT if "embedding_type" not in key)]) == 0
        )
    folder = (tmp_path if family == "llama" else pretrained) / family
    base = load_trained_model(folder, host)
    trainer = Trainer(load_config(overrides=[*QUICK, *RETRO, f"checkpoint.load={folder}"], host=host), host=host)
    sample = trainer.valid_data["valid"][0]
    tokens, labels = (torch.from_numpy(sample[key])[None] for key in ("tokens", "labels"))
    with torch.no_grad():
        expected, loss = (cross_entropy(one(tokens)[0, :, :256], labels[0]) for one in (base.model, trainer.model))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    added = ("encoder.", "decoder.layers.1.cross_attention.", "decoder.layers.1.pre_cross_attn_layernorm.")
    assert all(name.startswith(added) for name in trainer.loaded_weights.initialized)


@pytest.mark.slow
def test_a_llama_that_no_retro_can_be(pretrained, tmp_path, capsys) -> None:
    scaled = ["model.rope_scaling_type=linear", "model.rope_scaling_factor=2"]
    assert train(tmp_path, "llama", [*LLAMA, *scaled]) == 0
    assert train(tmp_path, "retro", [*RETRO, f"checkpoint.load={tmp_path / 'llama'}"]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "model.rope_scaling_type=linear, which model.family=retro cannot have (it has to be none)" in said
