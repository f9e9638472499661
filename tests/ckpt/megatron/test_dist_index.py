"""The index of a distributed checkpoint: slices that tile their tensors, and such that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mt_ckpt.files.tiling import tiles
from mt_ckpt.megatron_dist.index import METADATA_FILE, WrittenBlob, WrittenTensor, encode_index, read_index
from mt_core.errors import CheckpointError
from mt_core.tensor_slice import TensorSlice

PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
"""Of 3 x 3: no line cuts it in two."""
WHOLE = {
    "one chunk": ((3, 3), [((0, 0), (3, 3))]),
    "a pinwheel": ((3, 3), PINWHEEL),
    "rows and columns": ((2, 4, 5), [((0, 0, 0), (2, 1, 5)), ((0, 1, 0), (1, 3, 5)), ((1, 1, 0), (1, 3, 5))]),
    "a scalar": ((), [((), ())]),
    "nothing in it": ((0, 4), [((0, 0), (0, 2)), ((0, 2), (0, 2))]),
    "an empty chunk beside": ((4,), [((0,), (4,)), ((4,), (0,))]),
}
WRONG = {
    "one twice, one not": ((4,), [((0,), (2,)), ((0,), (2,))]),
    "overlapping": ((4, 2), [((0, 0), (3, 2)), ((2, 0), (1, 2))]),
    "beyond the end": ((4,), [((0,), (2,)), ((3,), (2,))]),
    "beside one another": ((2, 2), [((0, 0), (1, 2)), ((0, 1), (2, 1))]),
    "as many elements in another place": ((3, 3), [*PINWHEEL[:-1], ((0, 0), (1, 1))]),
    "of another number of dimensions": ((4,), [((0, 0), (2, 2))]),
    "a scalar twice": ((), [((), ()), ((), ())]),
}


@pytest.mark.parametrize("case", [*WHOLE, *WRONG])
def test_tiles_counts_every_element_once(case: str) -> None:
    """Against elements counted one by one."""
    shape, slices = {**WHOLE, **WRONG}[case]
    counted = torch.zeros([size + 3 for size in shape])
    alike = all(len(offsets) == len(shape) for offsets, _ in slices)
    for offsets, sizes in slices if alike else []:
        counted[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    expected = torch.zeros_like(counted)
    expected[tuple(slice(0, size) for size in shape)] = 1
    tiled = tiles(shape, [TensorSlice(*one) for one in slices])
    assert tiled == (alike and torch.equal(counted, expected)) == (case in WHOLE)


@pytest.mark.parametrize("case", WRONG)
def test_an_index_whose_chunks_do_not_tile_is_refused(case: str, tmp_path: Path) -> None:
    """Some have as many elements as the tensor: the missing ones would be read as whatever was in memory."""
    shape, slices = WRONG[case]
    (tmp_path / "0.distcp").touch()
    blobs = [WrittenBlob("a.weight", offsets, sizes, "0.distcp", 0, 0) for offsets, sizes in slices]
    data = encode_index({"a.weight": WrittenTensor(shape, torch.float32)}, blobs)
    (tmp_path / METADATA_FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"the chunks of a.weight (do not tile|have 2 elements)"):
        read_index(tmp_path)
