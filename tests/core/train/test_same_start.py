"""Ranks that were started differently are refused by name before any collective, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.errors import ConfigError
from mt_core.testing import run_ranks
from mt_core.train.same_start import NODE_KEYS, code_digests, compared_keys, require_same_samples
from mt_core.train.trainer import Trainer

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "train.micro_batch_size=2",
    "train.train_iters=2",
    "train.eval_iters=1",
    "lr_schedule.lr_warmup_iters=0",
]


def small(*settings: str) -> LoadedConfig:
    return load_config(preset="gpt-tiny", overrides=[*SMALL, *settings])


def refusal(rank: int, _: int, of_each: list[list[str]]) -> str:
    try:
        Trainer(small(*of_each[rank]))
    except ConfigError as error:
        return str(error)
    return "built"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("first", "other", "named"),
    [
        ("train.seed=1", "train.seed=2", "train.seed: 1 on {} (rank 0), 2 on"),
        ("optimizer.lr=0.001", "optimizer.lr=0.002", "optimizer.lr: 0.001 on"),
        ("data.corpus_bytes=1000000", "data.corpus_bytes=900000", "data.corpus_bytes: 1000000 on"),
        (
            "parallel.tensor_model_parallel_size=2",
            "parallel.pipeline_model_parallel_size=2",
            "parallel.tensor_model_parallel_size: 2 on",
        ),
    ],
)
def test_every_rank_names_what_differs_and_none_waits(first, other, named) -> None:
    import socket

    texts = run_ranks(2, refusal, [[first], [other]], timeout=60)
    assert texts[0] == texts[1]
    assert named.format(socket.gethostname()) in texts[0]


@pytest.mark.dist
def test_keys_of_a_node_may_differ() -> None:
    assert run_ranks(2, refusal, [["train.num_threads=1"], ["data.num_workers=0"]]) == ["built", "built"]


def other_samples(rank: int, _: int) -> str:
    import numpy as np

    # The same number, shape and fingerprint: files without checksums have that of their lengths.
    data = [{"tokens": np.arange(8) + (rank if index > 4 else 0)} for index in range(9)]
    with pytest.raises(ConfigError) as error:
        require_same_samples({"data.content": "same"}, {"train": data}, small().config)
    return str(error.value)


@pytest.mark.dist
def test_data_of_the_same_fingerprint_with_other_tokens_is_found() -> None:
    assert all("samples (train)" in text for text in run_ranks(2, other_samples))


def test_every_other_key_is_compared() -> None:
    config = small().config
    keys = compared_keys(config)
    for section, values in config.to_dict().items():
        for key, value in values.items():
            name = f"{section}.{key}"
            found = name in keys or any(one.startswith(f"{name}.") for one in keys)
            assert found == (name not in NODE_KEYS), (name, value)


def test_code_is_each_file_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.py").write_text("x = 1\n")
    before = code_digests({"one": tmp_path / "one"})
    (tmp_path / "one" / "a.py").write_text("x = 2\n")
    after = code_digests({"one": tmp_path / "one"})
    assert [name for name in before if before[name] != after[name]] == ["one/a.py"]
