"""The file of checksums beside what a conversion wrote: every corruption is found, and the file is named."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ckpt.convert_cases import GPT2, LLAMA
from tests.ckpt.test_ckpt_commands import refusal, run

from mt_ckpt.convert import convert
from mt_ckpt.files.checksum_file import CHECKSUMS, encode_checksums, find_changes, read_checksums
from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import CheckpointError

CUT = ConvertOptions(target_tensor_parallel_size=2, target_pipeline_parallel_size=2)
FORMATS = {
    "hf": ConvertOptions(max_shard_size=30_000),
    "megatron": CUT,
    "megatron-dist": ConvertOptions(max_shard_size=30_000),
    "megatron-legacy": CUT,
    "transformers-megatron": CUT,
    "trtllm": CUT,
    "meta": ConvertOptions(target_tensor_parallel_size=2),
}


@pytest.fixture
def written(make_model, host, tmp_path: Path):
    def write(saver: str) -> Path:
        keys = GPT2 if saver == "transformers-megatron" else LLAMA
        even = {"vocab_size": 102} if saver == "meta" else {}  # whose ranks have equal parts without padding
        convert(
            make_model(**{**keys, **even, "num_layers": 2}),
            tmp_path / "out",
            saver=saver,
            options=FORMATS[saver],
            host=host,
        )
        return tmp_path / "out"

    return write


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def corrupt(file: Path, way: str, generator: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if way == "flip":
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    elif way == "truncate":
        del data[generator.randrange(len(data)) :]
    elif way == "lengthen":
        data += bytes(generator.randrange(1, 100))
    if way == "remove":
        file.unlink()
    else:
        file.write_bytes(data)


def found_in(folder: Path) -> str:
    """What verification says; empty when it finds nothing."""
    try:
        checksums = read_checksums(folder)
        assert checksums is not None
        return "\n".join(find_changes(checksums))
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("saver", FORMATS)
def test_every_corruption_of_every_file_is_found_and_named(written, saver: str) -> None:
    folder = written(saver)
    assert found_in(folder) == ""
    generator = random.Random(saver)
    for number in range(150):
        file = generator.choice(files_of(folder))
        # Who removes the file of checksums has a folder like those of other programs.
        way = generator.choice(["flip", "flip", "truncate", "lengthen", *(["remove"] * (file.name != CHECKSUMS))])
        before = file.read_bytes()
        corrupt(file, way, generator)
        problems = found_in(folder)
        assert str(file) in problems, (number, file, way)
        assert len(problems.splitlines()) == 1
        file.write_bytes(before)
    assert found_in(folder) == ""


def everything_in(folder: Path, host) -> tuple[Any, ...]:
    """All that opening and reading gives."""
    reader = open_checkpoint(folder, host)
    tensors = {name: reader.read(name) for name in reader.shapes()}
    return dict(reader.metadata), dict(reader.files()), {name: bytes_of(tensor) for name, tensor in tensors.items()}


def bytes_of(tensor: torch.Tensor) -> tuple[torch.dtype, bytes]:
    return tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def everything_or_message(folder: Path, host) -> tuple[tuple[Any, ...] | None, str]:
    try:
        return everything_in(folder, host), ""
    except CheckpointError as error:
        return None, str(error)


@pytest.mark.slow
@pytest.mark.parametrize("saver", [name for name in FORMATS if name != "trtllm"])
def test_what_is_read_is_what_was_written(written, host, saver: str) -> None:
    """After any change of any file, reading refuses it and names the file, or gives what it gave before. Of a file by
    which a checkpoint is recognized, the folder is named."""
    folder = written(saver)
    expected = everything_in(folder, host)
    generator = random.Random(f"read {saver}")
    refused = 0
    files = [file for file in files_of(folder) if file.name != CHECKSUMS]
    for number in range(40):
        file = files[number % len(files)]
        way = generator.choice(["flip", "flip", "flip", "truncate", "remove"])
        before = file.read_bytes()
        corrupt(file, way, generator)
        found, message = everything_or_message(folder, host)
        assert found in (expected, None), (number, file, way)
        unknown = way == "remove" or "no complete checkpoint of a known format" in message
        assert found or str(folder if unknown else file) in message, (number, file, way)
        refused += found is None
        file.write_bytes(before)
    assert refused > 20, refused
    assert everything_in(folder, host) == expected


def test_a_changed_file_is_refused_with_what_to_do(written, host) -> None:
    folder = written("hf")
    shard = sorted(folder.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    reader = open_checkpoint(folder, host)  # whose header is right: the values are compared when they are read
    with pytest.raises(CheckpointError, match=rf"{shard.name}: damaged: .*remove .*{CHECKSUMS} if the files were"):
        [reader.read(name) for name in reader.shapes()]
    target = folder.parent / "again"
    with pytest.raises(CheckpointError, match=rf"{shard.name}: damaged"):
        convert(folder, target, saver="mt", host=host)
    assert not target.exists()
    # Whoever says that the change is meant is not asked again.
    (folder / CHECKSUMS).unlink()
    convert(folder, target, saver="mt", host=host)


def test_the_command(written) -> None:
    folder = written("hf")
    result = run("verify", folder)
    assert result.exit_code == 0, result.exception
    assert f"{folder}: whole ({len(files_of(folder)) - 1} files" in result.output
    shards = sorted(folder.glob("*.safetensors"))
    data = shards[1].read_bytes()
    shards[1].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (folder / "config.json").unlink()
    message = refusal("verify", folder)
    assert f"{folder / 'config.json'}: missing or unreadable" in message
    assert f"{shards[1]}: damaged: the bytes from" in message
    assert str(shards[0]) not in message


def test_a_format_that_is_only_written(written) -> None:
    """No loader reads it, but its bytes can be compared."""
    assert run("verify", written("trtllm")).exit_code == 0


def test_an_iteration_within_the_folder_that_was_written(written) -> None:
    folder = written("megatron")
    (iteration,) = folder.glob("iter_*")
    assert run("verify", iteration).exit_code == 0
    file = next(iteration.rglob("*.pt"))
    file.write_bytes(file.read_bytes()[:-3])
    assert f"{file}: truncated" in refusal("verify", iteration)


def test_bytes_that_are_right_and_a_model_that_is_not(written) -> None:
    """Checksums say that nothing changed since; names and shapes are still compared with the configuration."""
    folder = written("hf")
    config = (folder / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3').encode()
    (folder / "config.json").write_bytes(config)
    checksums = read_checksums(folder)
    from mt_ckpt.files.checksum import checksum

    files = {**checksums.files, "config.json": [(len(config), checksum(config))]}
    (folder / CHECKSUMS).write_bytes(encode_checksums(files))
    assert "model.layers.2" in refusal("verify", folder)


def test_mts_own_format_has_checksums_of_its_own(make_model, host, tmp_path: Path) -> None:
    convert(make_model(**LLAMA), tmp_path / "mt", saver="mt", host=host)
    assert not (tmp_path / "mt" / CHECKSUMS).exists()


def test_transformers_ignores_it(written) -> None:
    from transformers import AutoModelForCausalLM

    folder = written("hf")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "the checksum in its first line is not that of the other lines"),
        (encode_checksums({"../x": [(1, "0" * 32)]}), "lists '../x', which is not within its folder"),
        (encode_checksums({}).replace(b"{", b"x", 1), "the checksum in its first line"),
    ],
)
def test_a_file_of_checksums_that_is_none(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / CHECKSUMS).write_bytes(text)
    with pytest.raises(CheckpointError, match=words):
        read_checksums(tmp_path)
