"""Videos of records: ids, times and pixels against Qwen3-VL's processor of `transformers`; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tests.data.images.marker_tokenizer import write_marker_tokenizer
from tests.data.images.test_processors import assert_same_pixels

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest
from mt_data.datasets.images import video_files
from mt_data.datasets.images.image_text import ImageTextDataConfig, build_image_text
from mt_data.tokenizers.hugging_face import HuggingFaceConfig, build_hugging_face

transformers = pytest.importorskip("transformers")
SIDE = 8
KEYS = {
    "img_h": SIDE, "img_w": SIDE, "image_seq_length": 1, "dynamic_resolution": True, "frames_per_view": 2,
    "image_markers": "qwen2_vl", "min_pixels": SIDE**2, "max_pixels": 12 * SIDE**2, "min_video_pixels": 8 * SIDE**2,
    "max_video_pixels": 60 * SIDE**2, "max_images": 90,
}  # fmt: skip


def frames_of(count: int, height: int, width: int) -> list[np.ndarray]:
    random = np.random.RandomState(count)
    return [random.randint(0, 256, (height, width, 3)).astype(np.uint8) for _ in range(count)]


def write_folder(folder: Path, frames: list[np.ndarray]) -> None:
    folder.mkdir()
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"{number:04}.png")


def write_animation(path: Path, frames: list[np.ndarray], milliseconds: int) -> None:
    first, *rest = [Image.fromarray(frame) for frame in frames]
    first.save(path, save_all=True, append_images=rest, duration=milliseconds, lossless=True)


def samples_of(folder: Path, records: list[dict], **keys):
    write_marker_tokenizer(folder)
    (folder / "lines.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = build_hugging_face(HuggingFaceConfig(tokenizer_model=str(folder)))
    config = ImageTextDataConfig(
        image_token_index=tokenizer.vocab_size, train_data_path=[str(folder / "lines.jsonl")], **{**KEYS, **keys}
    )
    data = build_image_text(config, tokenizer, SplitRequest("train", None, 500, seed=1))
    return tokenizer, {data.members(index)[0]: data[index] for index in range(len(data))}


def processed(frames: list[np.ndarray], fps: float):
    """Cells [views, 2 frames x 3, SIDE, SIDE], grid and times of each view, by the functions of the processor that need
    no torchvision and Pillow's resizing."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

    processor = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    metadata = SimpleNamespace(total_num_frames=len(frames), fps=fps)
    taken = Qwen3VLVideoProcessor.sample_frames(processor, metadata, fps=2)
    pixels = (KEYS["min_video_pixels"], KEYS["max_video_pixels"])
    height, width = smart_resize(len(taken), *frames[0].shape[:2], 2, SIDE, *pixels)
    sized = [Image.fromarray(frames[number]).resize((width, height), Image.Resampling.BICUBIC) for number in taken]
    sized += sized[-1:] * (len(sized) % 2)
    # [views, frames, rows, SIDE, columns, SIDE, C] -> [views, rows, columns, frames, C, SIDE, SIDE]
    films = np.stack([np.asarray(frame, np.float32) / 127.5 - 1 for frame in sized])
    cells = films.reshape(-1, 2, height // SIDE, SIDE, width // SIDE, SIDE, 3).transpose(0, 2, 4, 1, 6, 3, 5)
    seconds = Qwen3VLProcessor._calculate_timestamps(None, taken.tolist(), fps)
    return cells.reshape(-1, 6, SIDE, SIDE), (len(sized) // 2, height // SIDE, width // SIDE), seconds


@pytest.mark.parametrize(("count", "fps", "size"), [(5, 1.0, (20, 30)), (24, 8.0, (17, 9)), (3, 24.0, (40, 44))])
def test_frames_of_a_folder_are_those_of_the_processor(tmp_path: Path, count: int, fps: float, size) -> None:
    """Odd numbers of frames, more and fewer than are taken; sizes below and above the pixels of all together."""
    frames = frames_of(count, *size)
    write_folder(tmp_path / "film", frames)
    cells, (times, rows, columns), seconds = processed(frames, fps)
    record = {"video": "film", "fps": fps, "question": "what", "answer": "this"}
    tokenizer, samples = samples_of(tmp_path, [record])
    sample = samples[0]
    grids = sample["image_grids"][sample["image_grids"][:, 0] > 0]
    assert grids.tolist() == [[rows, columns]] * times
    assert_same_pixels(sample["images"][: len(cells)], cells, 1 / 255 / 0.5)
    assert not sample["images"][len(cells) :].any()
    start, end = (tokenizer.encode(f"<|vision_{name}|>") for name in ("start", "end"))
    image = [tokenizer.vocab_size] * (rows * columns)
    stamps = [tokenizer.encode(f"<{time:.1f} seconds>") for time in seconds]
    expected = [token for stamp in stamps for token in (*stamp, *start, *image, *end)]
    tokens = sample["tokens"].tolist()
    places = [place for place in range(len(tokens)) if tokens[place : place + len(expected)] == expected]
    assert len(places) == 1


@pytest.mark.parametrize(
    ("count", "fps", "size", "taken", "sized"),
    [
        (9, 2.0, (20, 30), [0, 1, 2, 3, 4, 5, 6, 7], (16, 32)),
        (24, 8.0, (17, 9), [0, 4, 8, 12, 16, 20], (32, 24)),
        (11, 30.0, (90, 44), [0, 2, 5, 8], (88, 40)),
        (37, 5.0, (20, 20), [0, 2, 5, 7, 10, 13, 15, 18, 21, 23, 26, 29, 31, 34], (24, 24)),
    ],
)
def test_a_video_is_one_image_with_times_for_qwen2_vl(
    tmp_path: Path, count: int, fps: float, size: tuple[int, int], taken: list[int], sized: tuple[int, int]
) -> None:
    """taken, sized: by the functions of Qwen2VLVideoProcessor of transformers 5.23, which need torchvision."""
    frames = frames_of(count, *size)
    write_folder(tmp_path / "film", frames)
    (height, width), views = sized, len(taken) // 2
    rows, columns = height // SIDE, width // SIDE
    record = {"video": "film", "fps": fps, "question": "what", "answer": "this"}
    tokenizer, samples = samples_of(tmp_path, [record], video_rule="qwen2_vl", max_images=500)
    sample = samples[0]
    each = 2 / (len(taken) / count * fps)
    times = [round(view * each * 1e6) for view in range(views)]
    assert sample["image_grids"][: views + 1].tolist() == [*([rows, columns, time] for time in times), [0, 0, 0]]
    start, end = (tokenizer.encode(f"<|vision_{name}|>") for name in ("start", "end"))
    expected = [*start, *[tokenizer.vocab_size] * (views * rows * columns), *end]
    tokens = sample["tokens"].tolist()
    assert [tokens[place : place + len(expected)] for place in range(len(tokens))].count(expected) == 1
    for view, pair in enumerate(zip(taken[::2], taken[1::2], strict=True)):
        shown = [Image.fromarray(frames[number]).resize((width, height), Image.Resampling.BICUBIC) for number in pair]
        films = np.stack([np.asarray(frame, np.float32) / 127.5 - 1 for frame in shown])
        cells = films.reshape(2, rows, SIDE, columns, SIDE, 3).transpose(1, 3, 0, 5, 2, 4).reshape(-1, 6, SIDE, SIDE)
        assert_same_pixels(sample["images"][view * len(cells) : (view + 1) * len(cells)], cells, 1 / 255 / 0.5)


def processed_text(kind: str, count: int, fps: float, cells: int) -> tuple[list[int], str]:
    """Frames taken of a video, and what stands for it in a text, by the functions of the processors that need no
    torchvision; the token of a cell is "@". kind: "kimi" or "minimax"."""
    from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
    from transformers.models.minimax_m3_vl.processing_minimax_m3_vl import MiniMaxM3VLProcessor
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

    metadata = VideoMetadata(total_num_frames=count, fps=fps)
    taken = default_sample_indices_fn(metadata, fps=2.0).tolist()
    metadata.frames_indices = taken
    size = 4 if kind == "kimi" else 2
    views = -(-len(taken) // size)
    # A chunk is a view of Kimi, and up to four views of MiniMax.
    chunks = views if kind == "kimi" else -(-views // 4)
    times = [1] * views if kind == "kimi" else [min(4, views - start) for start in range(0, views, 4)]
    inputs = {
        "num_chunks_per_video": [chunks],
        "video_grid_thw": np.array([(time, 2, 2 * cells) for time in times]),
        "video_metadata": [metadata],
    }
    state = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=size))
    state.video_token = state.VIDEO_TOKEN = "@"
    if kind == "kimi":
        return taken, Kimi_K25Processor.replace_video_token(state, inputs, 0)
    state.VISION_START_TOKEN, state.VISION_END_TOKEN = "]<]start of image[>[", "]<]end of image[>["
    return taken, MiniMaxM3VLProcessor.replace_video_token(state, inputs, 0)


@pytest.mark.parametrize(("count", "fps"), [(9, 2.0), (41, 7.5), (1, 2.0), (50, 24.0)])
@pytest.mark.parametrize("kind", ["kimi", "minimax"])
def test_views_of_kimi_and_minimax_have_the_texts_of_their_processors(
    tmp_path: Path, kind: str, count: int, fps: float
) -> None:
    """Frames that are taken, their times, markers, the third number of grids; pixels of frames of 20 by 30 pixels."""
    frames = frames_of(count, 20, 30)
    write_folder(tmp_path / "film", frames)
    keys = {
        "kimi": {"video_rule": "kimi_k25", "image_markers": "kimi", "frames_per_view": 4, "size_rule": "padded"},
        # 20 x 30 pixels are 2 x 4 cells.
        "minimax": {"video_rule": "minimax_m3", "image_markers": "minimax_m3"},
    }[kind]
    cells = 12 if kind == "kimi" else 8
    taken, text = processed_text(kind, count, fps, cells)
    record = {"video": "film", "fps": fps, "text": "a <video> b"}
    pixels = {"min_video_pixels": SIDE**2, "max_video_pixels": 12 * SIDE**2}
    limits = {"min_video_frames": 1, "max_images": 300}
    tokenizer, samples = samples_of(tmp_path, [record], **keys, **pixels, **limits)
    sample, size = samples[0], keys.get("frames_per_view", 2)
    views = [taken[start : start + size] for start in range(0, len(taken), size)]
    times = [len(view) if kind == "kimi" else place % 4 for place, view in enumerate(views)]
    rows, columns = (3, 4) if kind == "kimi" else (2, 4)
    assert sample["image_grids"][: len(views) + 1].tolist() == [*([rows, columns, time] for time in times), [0, 0, 0]]
    pieces = [tokenizer.encode(piece) if piece else [] for piece in text.split("@" * cells)]
    expected = [token for piece in pieces[:-1] for token in (*piece, *[tokenizer.vocab_size] * cells)] + pieces[-1]
    tokens = sample["tokens"].tolist()
    assert [tokens[place : place + len(expected)] for place in range(len(tokens))].count(expected) == 1
    for number, view in enumerate(views):
        shown = np.stack([shown_frame(frames[frame], kind, rows, columns) for frame in view])
        grid = shown.reshape(len(view), rows, SIDE, columns, SIDE, 3).transpose(1, 3, 0, 5, 2, 4)
        found = sample["images"][number * cells : (number + 1) * cells, : 3 * len(view)]
        assert_same_pixels(found, grid.reshape(cells, -1, SIDE, SIDE), 1 / 255 / 0.5)


def shown_frame(frame: np.ndarray, kind: str, rows: int, columns: int) -> np.ndarray:
    """The frame in the size of its grid: padded with black, or stretched."""
    if kind == "kimi":
        padded = np.zeros((rows * SIDE, columns * SIDE, 3), np.float32)
        padded[: frame.shape[0], : frame.shape[1]] = frame
    else:
        size = columns * SIDE, rows * SIDE
        padded = np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC), np.float32)
    return padded / 127.5 - 1


def test_videos_one_behind_the_other_are_two_images(tmp_path: Path) -> None:
    frames = frames_of(4, 16, 16)
    write_folder(tmp_path / "film", frames)
    record = {"videos": ["film", "film"], "fps": 2, "text": "<video><video>"}
    tokenizer, samples = samples_of(tmp_path, [record], video_rule="qwen2_vl")
    grids = samples[0]["image_grids"][:5, 2].tolist()
    assert grids == [0, 1_000_000, 0, 1_000_000, 0]
    start, tokens = tokenizer.encode("<|vision_start|>"), samples[0]["tokens"].tolist()
    assert [tokens[place : place + len(start)] for place in range(len(tokens))].count(start) == 2


def test_an_animated_file_is_the_same_as_its_frames(tmp_path: Path) -> None:
    frames = frames_of(6, 16, 24)
    write_folder(tmp_path / "film", frames)
    write_animation(tmp_path / "film.webp", frames, 500)
    records = [
        {"video": "film", "fps": 2, "text": "a <video> b"},
        {"video": "film.webp", "text": "a <video> b"},
    ]
    _, samples = samples_of(tmp_path, records)
    for name in ("tokens", "image_grids"):
        assert np.array_equal(samples[0][name], samples[1][name])
    assert np.abs(samples[0]["images"] - samples[1]["images"]).max() < 0.02


def write_film(path: Path, frames: list[np.ndarray], fps: int) -> None:
    """Without loss; groups of frames that refer to one another, forwards and backwards."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libx264rgb", rate=fps, options={"crf": "0", "bf": "2", "g": "5", "preset": "fast"}
        )
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


@pytest.mark.parametrize("name", ["film.mp4", "film.mkv"])
def test_a_video_file_is_the_same_as_its_frames(tmp_path: Path, name: str) -> None:
    """Frames are taken from the middle of groups whose frames refer to one another; 13 of 4 in a second."""
    frames = frames_of(13, 16, 24)
    write_folder(tmp_path / "film", frames)
    write_film(tmp_path / name, frames, 4)
    records = [{"video": "film", "fps": 4, "text": "a <video> b"}, {"video": name, "text": "a <video> b"}]
    _, samples = samples_of(tmp_path, records)
    for key in ("tokens", "image_grids", "images"):
        assert np.array_equal(samples[0][key], samples[1][key]), key


def test_a_turned_video_is_read_as_it_is_shown() -> None:
    """A quarter turn against the clock, as PyAV gives the angle of a display matrix."""
    frame = SimpleNamespace(rotation=90, to_ndarray=lambda format: np.arange(18, dtype=np.uint8).reshape(2, 3, 3))
    found = video_files._upright(frame)
    assert found.shape == (3, 2, 3)
    assert found[0, 0].tolist() == [6, 7, 8]


def test_video_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    pytest.importorskip("av")
    write_film(tmp_path / "film.mp4", frames_of(4, 16, 16), 4)
    whole = (tmp_path / "film.mp4").read_bytes()
    (tmp_path / "film.mp4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"film.mp4 cannot be read as a video"):
        samples_of(tmp_path, [{"video": "film.mp4", "text": "a"}])
    # A list of further files, which FFmpeg would follow, is none.
    (tmp_path / "film.mp4").write_text("ffconcat version 1.0\nfile other.mp4\n")
    with pytest.raises(DataError, match=r"film.mp4 cannot be read as an image"):
        samples_of(tmp_path, [{"video": "film.mp4", "text": "a"}])


def test_stills_beside_videos_have_two_equal_frames_and_their_order(tmp_path: Path) -> None:
    frames = frames_of(4, 16, 16)
    write_folder(tmp_path / "film", frames)
    Image.fromarray(frames[0][:8]).save(tmp_path / "still.png")
    record = {"video": "film", "image": "still.png", "fps": 2, "text": "<video> then <image>"}
    _, samples = samples_of(tmp_path, [record])
    grids = samples[0]["image_grids"]
    assert grids[:3].tolist() == [[2, 2], [2, 2], [1, 2]]
    still = samples[0]["images"][8:10]
    assert still.any()
    assert np.array_equal(still[:, :3], still[:, 3:])


@pytest.mark.parametrize(
    ("record", "keys", "words"),
    [
        ({"video": "film", "text": "a"}, {"frames_per_view": 1}, "has a video; set data.dynamic_resolution=true"),
        ({"video": "none", "text": "a"}, {}, "none cannot be read"),
        ({"video": "empty", "text": "a"}, {}, "empty has no frames"),
        ({"video": "film", "fps": 0, "text": "a"}, {}, 'above 0 under "fps", found 0'),
        ({"video": "film", "text": "<video> <video>"}, {}, 'has "<video>" 2 times, and the number of videos is 1'),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, record: dict, keys: dict, words: str) -> None:
    write_folder(tmp_path / "film", frames_of(2, 16, 16))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=words):
        samples_of(tmp_path, [record], **keys)


def test_another_number_of_frames_than_the_rule_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frames_per_view=2 does not fit data.video_rule=kimi_k25; it can be 4, or 1"):
        samples_of(tmp_path, [], video_rule="kimi_k25")
