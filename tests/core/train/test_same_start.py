"""Ranks that were started differently are refused by name before any collective, on every rank."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.errors import ConfigError
from mt_core.testing import run_ranks
from mt_core.train import same_start
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


def trained_in(rank: int, _: int, folders: list[Path]) -> str:
    same_start.SECONDS_UNTIL_SEEN = 0.5
    os.chdir(folders[rank])
    try:
        Trainer(small(), run_dir="run").train()
    except ConfigError as error:
        return str(error)
    return "trained"


@pytest.mark.dist
@pytest.mark.slow
def test_a_relative_path_in_two_working_folders_is_no_run_directory(tmp_path: Path) -> None:
    """The first save waited for an hour for the report of the rank that writes elsewhere."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "run" / "checkpoints").mkdir(parents=True)
    texts = run_ranks(2, trained_in, [tmp_path / "a", tmp_path / "b"], timeout=120)
    unseen = tmp_path / "b" / "run" / "checkpoints"
    for text in texts:
        assert (
            f"what rank 0 writes into run/checkpoints: seen on {socket.gethostname()} (rank 0), not seen in {unseen}"
            in text
        )
    assert list((tmp_path / "a" / "run" / "checkpoints").iterdir()) == []


def seen_through(rank: int, _: int, folders: list[Path]) -> None:
    same_start.require_shared_folder(folders[rank], small().config)


@pytest.mark.dist
def test_one_folder_by_two_paths_is_shared(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    run_ranks(2, seen_through, [tmp_path / "real", tmp_path / "link"], timeout=60)
    assert list((tmp_path / "real").iterdir()) == []


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
            may_differ = name in NODE_KEYS or key in config.named(section).keys_of_node
            assert found == (not may_differ), (name, value)


def test_code_is_each_file_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.py").write_text("x = 1\n")
    before = code_digests({"one": tmp_path / "one"})
    (tmp_path / "one" / "a.py").write_text("x = 2\n")
    after = code_digests({"one": tmp_path / "one"})
    assert [name for name in before if before[name] != after[name]] == ["one/a.py"]


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]


@pytest.mark.dist
def test_another_tokenizer_is_named_by_its_content(tmp_path: Path) -> None:
    """In files of the same name; the second has two tokens in another order."""
    of_each = []
    for rank, words in enumerate((VOCABULARY, [*VOCABULARY[:-2], "h", "g"])):
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "vocab.txt").write_text("\n".join(words))
        of_each.append(["tokenizer.tokenizer_type=BertWordPieceLowerCase", f"tokenizer.vocab_file={folder}/vocab.txt"])
    texts = run_ranks(2, refusal, of_each, timeout=60)
    assert texts[0] == texts[1]
    assert "tokenizer.content" in texts[0]
    assert run_ranks(2, refusal, [of_each[0], of_each[0]], timeout=60) == ["built", "built"]


def with_another_version(rank: int, world: int, folder: Path) -> str:
    sys.path.insert(0, str(folder / str(rank)))
    return refusal(rank, world, [[], []])


@pytest.mark.dist
def test_another_version_of_a_package_is_named(tmp_path: Path) -> None:
    for rank, version in enumerate(("2.1.0", "2.2.0")):
        metadata = tmp_path / str(rank) / "numpy-9.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: numpy\nVersion: {version}\n")
    texts = run_ranks(2, with_another_version, tmp_path, timeout=60)
    assert texts[0] == texts[1]
    assert "version of numpy: 2.1.0 on" in texts[0]


PROGRAM = """
import os
import mine  # from a folder that another one is mounted over
import torch.distributed as dist
from tests.core.train.test_same_start import refusal

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)
print(refusal(rank, 2, [[], []]))
"""


def in_containers(folder: Path, codes: tuple[str, str]) -> list[str]:
    """What two ranks say that import `mine` by the same path, each in a mount namespace of its own."""
    shown, program = folder / "code", folder / "program.py"
    shown.mkdir(parents=True)
    program.write_text(PROGRAM)
    paths = os.pathsep.join([str(shown), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "PYTHONPATH": paths, "STORE": str(folder / "store"), "OMP_NUM_THREADS": "1"}
    started = []
    for rank, code in enumerate(codes):
        own = folder / f"code-{rank}"
        own.mkdir()
        (own / "mine.py").write_text(code)
        command = f'mount --bind "{own}" "{shown}" && exec "{sys.executable}" "{program}"'
        environment = {**common, "RANK": str(rank)}
        started.append(
            subprocess.Popen(
                [*NAMESPACE, "sh", "-c", command],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    outputs = [process.communicate(timeout=120) for process in started]
    return [out.strip() or error for out, error in outputs]


NAMESPACE = ["unshare", "--map-root-user", "--mount"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.long
def test_containers_with_one_name_and_path_and_other_code_are_told_apart(tmp_path: Path) -> None:
    if shutil.which(NAMESPACE[0]) is None or subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("no mount namespaces without privileges here")
    texts = in_containers(tmp_path / "other", ("x = 1\n", "x = 2\n"))
    assert all("mine (mine.py)" in text and "code (SHA-256)" in text for text in texts), texts
    assert in_containers(tmp_path / "same", ("x = 1\n", "x = 1\n")) == ["built", "built"]


@pytest.mark.parametrize("changed", ["BOOT_ID", "MOUNTS", "hostname"])
def test_a_file_system_is_that_of_its_kernel_mounts_and_host(changed: str, tmp_path: Path, monkeypatch) -> None:
    from mt_core.train import same_start

    (tmp_path / "boot").write_text("of another machine\n")
    (tmp_path / "mounts").symlink_to("mnt:[1]")
    before = same_start.file_system()
    assert before == same_start.file_system()
    if changed == "hostname":
        monkeypatch.setattr("socket.gethostname", lambda: "other")
    else:
        monkeypatch.setattr(same_start, changed, tmp_path / {"BOOT_ID": "boot", "MOUNTS": "mounts"}[changed])
    assert same_start.file_system() != before
    monkeypatch.setattr(same_start, "BOOT_ID", tmp_path / "missing")
    assert same_start.file_system() != same_start.file_system(), "unknown: code is compared"
