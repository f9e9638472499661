"""What is saved comes back bit for bit, and the files are what the documentation says."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mt_ckpt.native.read import open_checkpoint
from mt_ckpt.native.save import save_checkpoint
from mt_core.errors import CheckpointError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
]


def bits(tensor: torch.Tensor) -> bytes:
    """Row-major bytes, found another way than the saver finds them."""
    if not tensor.numel():
        return b""
    if tensor.dtype == torch.bool:
        return bytes(int(value) for value in tensor.flatten().tolist())
    as_int = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return b"".join(
        value.to_bytes(tensor.element_size(), "little", signed=True)
        for value in tensor.clone(memory_format=torch.contiguous_format).view(as_int).flatten().tolist()
    )


@st.composite
def random_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bit pattern (NaNs included) in any dtype, 0 to 4 axes, sometimes empty, often not contiguous."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = int(torch.tensor(shape).prod()) if shape else 1
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    size = 1 if dtype == torch.bool else torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * size,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).reshape(shape)
    if draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[::2]
    return tensor


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=st.lists(random_tensors(), max_size=12), max_shard_bytes=st.sampled_from([1, 64, 1 << 20]))
def test_any_tensors_come_back_bit_for_bit(tmp_path: Path, tensors: list[torch.Tensor], max_shard_bytes: int) -> None:
    path = tmp_path / "iter_0000001"
    named = {f"model.t{i}": tensor for i, tensor in enumerate(tensors)}
    save_checkpoint(path, named.items(), {}, {}, max_shard_bytes=max_shard_bytes)
    reader = open_checkpoint(path)
    by_library = {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}
    assert set(by_library) == set(named)
    assert list(reader.shapes().items()) == [(name, tuple(tensor.shape)) for name, tensor in named.items()]
    for name, tensor in named.items():
        for read in (reader.read(name), by_library[name]):
            assert (read.dtype, read.shape, bits(read)) == (tensor.dtype, tensor.shape, bits(tensor))


def test_layout_on_disk(tmp_path: Path) -> None:
    """The format as documented, read without any of our code or the safetensors library."""
    path = tmp_path / "c"
    weight = torch.tensor([[1.5, -2.0], [0.0, 4.0]])
    save_checkpoint(path, [("w", weight), ("step", torch.tensor(7))], {"iteration": 7}, {"a/b.txt": b"text"})
    first, rest = (path / "manifest.json").read_bytes().split(b"\n", 1)
    manifest = json.loads(first + rest)
    assert (manifest["format"], manifest["version"], manifest["checksum_algorithm"]) == ("mt-checkpoint", 2, "xxh3_128")
    assert json.loads((path / "metadata.json").read_text()) == {"iteration": 7}
    assert (path / "files/a/b.txt").read_bytes() == b"text"
    (stored,) = manifest["tensors"]["w"]["pieces"]
    assert (stored["start"], stored["shape"], manifest["tensors"]["w"]["shape"]) == ([0, 0], [2, 2], [2, 2])
    shard = (path / stored["shard"]).read_bytes()
    assert stored["offset"] % 8 == 0
    assert struct.unpack_from("<4f", shard, stored["offset"]) == (1.5, -2.0, 0.0, 4.0)
    (length,) = struct.unpack_from("<Q", shard)
    header = json.loads(shard[8 : 8 + length])
    assert header["w"] == {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    assert 8 + length == stored["offset"]
    listed = {*manifest["files"], *manifest["shards"], "manifest.json"}
    assert listed == {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def test_checksum_is_the_published_algorithm() -> None:
    """Test vector of XXH3_128bits for empty input, from the xxHash project."""
    from mt_ckpt.files.checksum import checksum

    assert checksum(b"") == "99aa06d3014798d86001c324468d497f"


def test_tensors_that_share_memory_and_carry_gradients(tmp_path: Path) -> None:
    base = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    views = {"all": base, "row": base[1], "transposed": base.t(), "expanded": base[:1].expand(5, 4), "again": base}
    save_checkpoint(tmp_path / "c", views.items(), {}, {})
    reader = open_checkpoint(tmp_path / "c")
    for name, view in views.items():
        read = reader.read(name)
        assert torch.equal(read, view)
        assert read.is_contiguous()
        assert not read.requires_grad


def test_a_source_may_reuse_its_memory(tmp_path: Path) -> None:
    """A tensor is written before the next one is asked for."""
    buffer = torch.empty(1000)

    def source():
        for i in range(5):
            yield f"t{i}", buffer.fill_(i)

    save_checkpoint(tmp_path / "c", source(), {}, {})
    reader = open_checkpoint(tmp_path / "c")
    assert [reader.read(f"t{i}").unique().tolist() for i in range(5)] == [[i] for i in range(5)]


def test_shards_are_bounded_and_headers_may_fill_up(tmp_path: Path) -> None:
    many = {f"model.{'long' * 40}.{i}": torch.full((3,), float(i)) for i in range(600)}
    large = {"large": torch.arange(1000.0), "small": torch.zeros(10)}
    save_checkpoint(tmp_path / "c", {**many, **large}.items(), {}, {}, max_shard_bytes=2000)
    shards = sorted((tmp_path / "c").glob("*.safetensors"))
    sizes = [shard.stat().st_size - (64 << 10) for shard in shards]
    assert sorted(sizes)[-1] == 4000
    assert all(size <= 2000 for size in sorted(sizes)[:-1])
    assert sorted(name for shard in shards for name in load_file(shard)) == sorted([*many, *large])
    reader = open_checkpoint(tmp_path / "c")
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in {**many, **large}.items())


@pytest.mark.parametrize(
    ("tensors", "metadata", "files", "words"),
    [
        ([("w", torch.zeros(2)), ("w", torch.zeros(2))], {}, {}, ["tensor w", "twice"]),
        ([("w", torch.zeros(2, dtype=torch.complex64))], {}, {}, ["tensor w", "complex64", "float32"]),
        ([("w", torch.zeros(2, device="meta"))], {}, {}, ["tensor w", "meta"]),
        ([("w", torch.eye(2).to_sparse())], {}, {}, ["tensor w", "sparse"]),
        ([("n" * 70_000, torch.zeros(2))], {}, {}, ["70000 characters"]),
        ([], {"path": Path("x")}, {}, ["metadata.path", "JSON"]),
        ([], {}, {"../x": b""}, ["'../x'", "relative path"]),
        ([], {}, {"/etc/x": b""}, ["'/etc/x'", "relative path"]),
    ],
)
def test_what_cannot_be_stored_is_refused(tmp_path: Path, tensors, metadata, files, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "c", tensors, metadata, files)
    assert all(word in str(caught.value) for word in words)
    assert list(tmp_path.iterdir()) == []


def test_unknown_tensor_names_the_nearest(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r'model\.layer\.3\.weight \(did you mean "model\.layers\.3\.weight"\?\)'):
        open_checkpoint(saved).read("model.layer.3.weight")
