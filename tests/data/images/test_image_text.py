"""Images with texts from shards and lines: against webdataset's reader, tiles, packing, order, damaged images."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import random
import tarfile
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import webdataset
from PIL import Image
from rich.console import Console
from tests.data.images.shape_shards import draw_shape, write_questions

from mt_core.data.loader import BatchReader
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest
from mt_core.plugins import load_plugins
from mt_core.specs import DATASETS
from mt_data.commands.display import render_sample
from mt_data.datasets.images.encoded import UnusableRecords
from mt_data.datasets.images.records import read_image_texts
from mt_data.datasets.images.text import ImageTextEncoder
from mt_data.datasets.images.tiles import Grid, LongestEdgeTiling, Tiling
from mt_data.datasets.sft.chat_templates import load_chat_template
from mt_data.tokenizers.byte_level import ByteLevelTokenizer

TOKENIZER = ByteLevelTokenizer()
IMAGE = 261
KEYS = {"img_h": 16, "img_w": 16, "image_token_index": IMAGE, "image_seq_length": 3}
EOD = 256


def build(*paths: Path, samples: int | None = None, length: int = 64, **keys):
    spec = load_plugins()[DATASETS].get("image_text")
    given = {"dataset_type": "image_text", "train_data_path": list(map(str, paths)), **KEYS, **keys}
    config = spec.config_type.load().model_validate(given)
    return spec.build.load()(config, TOKENIZER, SplitRequest("train", samples, length, seed=7))


def shown(ids) -> str:
    """Tokens as text: an image position is #, the end of a document $, padding is left out."""
    return "".join("#" if t == IMAGE else "$" if t == EOD else chr(t) if t < EOD else "" for t in ids)


def learnt(sample) -> str:
    return shown(sample["labels"][sample["loss_mask"] == 1])


def pixels(image: Image.Image) -> np.ndarray:
    """What the model takes of an image of its size, by the formula of the configuration: (value / 255 - 0.5) / 0.5"""
    return (np.asarray(image.convert("RGB"), np.float32) / 255 - 0.5).transpose(2, 0, 1) / 0.5


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for number in range(2):
        write_questions(folder / f"shapes-{number}.tar", 7, seed=number)
    return folder


def write_lines(folder: Path, *lines: dict) -> Path:
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "lines.jsonl"


def save(folder: Path, name: str, seed: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    image = draw_shape(random.Random(seed))[0].resize(size)
    image.save(folder / name)
    return image


# -- shards ------------------------------------------------------------------------------------------


def test_shards_hold_what_webdataset_reads(shards: Path) -> None:
    data = build(shards / "shapes-*.tar")
    files = sorted(map(str, shards.glob("*.tar")))
    expected = {
        (sample["json"]["answer"], pixels(sample["png"]).tobytes())
        for sample in webdataset.WebDataset(files, shardshuffle=False).decode("pil")
    }
    samples = [data[index] for index in range(len(data))]
    found = {(learnt(sample)[1:-1], sample["images"][0].tobytes()) for sample in samples}
    assert found == expected
    assert len(data) == 14
    assert shown(samples[0]["tokens"]).startswith("User: ###\nWhat?\n\nAssistant: ")
    assert "shapes-" in data.describe(0)


def test_the_order_depends_on_seed_and_sample_alone(shards: Path) -> None:
    """Any number of threads and of data-parallel ranks reads the same samples, from any step on."""
    data = build(shards / "shapes-*.tar", samples=24)

    def read(first: int, ranks: int, workers: int) -> list[bytes]:
        rows = {}
        for rank in range(ranks):
            steps = [(start, 4) for start in range(first, 24, 4)]
            reader = BatchReader(data, steps, micro_size=2, dp_rank=rank, dp_size=ranks, workers=workers)
            for batch in reader:
                for arrays, numbers in zip(batch.micro_batches, batch.samples, strict=True):
                    rows |= {n: arrays["images"][i].tobytes() for i, n in enumerate(numbers)}
        return [rows[number] for number in range(first, 24)]

    expected = read(0, 1, 0)
    assert read(0, 2, 3) == expected
    assert read(8, 2, 2) == expected[8:]
    assert len(set(expected[:14])) == len(set(expected)) > 10  # an epoch has every record


def test_members_are_grouped_and_named_as_webdataset_does(tmp_path: Path) -> None:
    """Extensions behind the first dot, several images in the order of their names, folders, texts, other members."""
    images = [draw_shape(random.Random(seed))[0] for seed in range(3)]
    with webdataset.TarWriter(str(tmp_path / "x.tar")) as writer:
        writer.write({"__key__": "a/b", "2.png": images[1], "1.png": images[0], "txt": "two", "cls": 5})
        writer.write({"__key__": "a/c", "PNG": images[2], "json": {"caption": "see <image>!"}})
        writer.write({"__key__": "d", "json": {"text": "no image"}})
    data = build(tmp_path / "x.tar", max_images=2)
    samples = {learnt(data[index]): data[index] for index in range(3)}
    assert set(samples) == {"two$", "ee !$", "o image$"}
    assert shown(samples["two$"]["tokens"]) == "######two"
    assert np.array_equal(samples["two$"]["images"], np.stack([pixels(image) for image in images[:2]]))
    assert np.array_equal(samples["ee !$"]["images"][0], pixels(images[2]))
    assert not samples["o image$"]["images"].any()


def test_a_shard_that_changed_is_another_content(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    for path in shards.glob("*.tar"):
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    first = build(shards / "*.tar").fingerprint()
    assert build(tmp_path / "copy" / "*.tar").fingerprint() == first
    write_questions(tmp_path / "copy" / "shapes-1.tar", 7, seed=9)
    assert build(tmp_path / "copy" / "*.tar").fingerprint() != first


def test_a_sample_can_be_shown(shards: Path) -> None:
    """The image token is behind the vocabulary."""
    fields = load_plugins()[DATASETS].get("image_text").sample
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_sample(build(shards / "shapes-0.tar")[0], fields, TOKENIZER, 64))
    assert "What?" in console.export_text()


# -- views -------------------------------------------------------------------------------------------


def test_grids_are_those_of_transformers() -> None:
    got_ocr = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    for tiles in (1, 4, 6, 12):
        tiling = Tiling(448, 448, tiles)
        for height, width in [(448, 448), (300, 900), (1000, 400), (448, 896), (200, 100), (2000, 1500), (336, 1344)]:
            columns, rows = got_ocr.get_optimal_tiled_canvas((height, width), (448, 448), 1, tiles)
            assert tiling.grid(height, width) == Grid(rows, columns), (tiles, height, width)


def test_no_image_has_more_views_than_the_most() -> None:
    """The most is reached: by a square image, or by one that is a little wider or higher, as the tiles are."""
    for edge, img_h, img_w in itertools.product((1, 2, 5, 8, 9), (1, 2, 3, 7), (1, 2, 3, 7)):
        tiling = LongestEdgeTiling(img_h, img_w, longest_edge=edge)
        sizes = itertools.product(range(1, edge + 2), repeat=2)
        assert tiling.max_views == max(tiling.num_views(tiling.grid(*size)) for size in sizes), tiling


def test_an_image_is_cut_into_tiles_and_a_thumbnail(tmp_path: Path) -> None:
    """An image of three tiles side by side is cut at them; each takes its features in the text."""
    image = save(tmp_path, "wide.png", 1, size=(48, 16))
    save(tmp_path, "square.png", 2)
    lines = write_lines(tmp_path, {"image": "wide.png", "text": "wide"}, {"image": "square.png", "text": "square"})
    data = build(lines, max_num_tiles=6, use_thumbnail=True)
    samples = {learnt(data[index]): data[index] for index in range(2)}
    wide, square = samples["wide$"], samples["square$"]
    assert wide["images"].shape == (7, 3, 16, 16)
    assert shown(wide["tokens"]) == "#" * 3 * 4 + "wide"
    for place in range(3):
        assert np.array_equal(wide["images"][place], pixels(image.crop((16 * place, 0, 16 * place + 16, 16))))
    thumbnail = pixels(image.resize((16, 16), Image.Resampling.BICUBIC))
    assert np.abs(wide["images"][3] - thumbnail).max() <= 1.01 / 127.5
    assert not wide["images"][4:].any()
    assert shown(square["tokens"]) == "###square"
    assert not square["images"][1:].any()


# -- packing -----------------------------------------------------------------------------------------


def test_packed_records_do_not_see_one_another(tmp_path: Path) -> None:
    images = {name: save(tmp_path, f"{name}.png", number) for number, name in enumerate("abcd")}
    texts = {"a": "one", "b": "three", "c": "seventeen letters", "d": "x"}
    data = build(
        write_lines(tmp_path, *({"image": f"{n}.png", "text": texts[n]} for n in texts)), length=24, packing=True
    )
    assert len(data) == 2
    found = {}
    for index in range(2):
        sample = data[index]
        assert sample["images"].shape == (8, 3, 16, 16)
        segments, members = sample["segment_ids"], len(data.members(index))
        for segment in range(members):
            inside = segments == segment
            assert sample["position_ids"][inside].tolist() == list(range(inside.sum()))
            text = shown(sample["tokens"][inside])
            assert text.startswith("###")
            assert shown(sample["labels"][inside][sample["loss_mask"][inside] == 1]) == f"{text[3:]}$"
            found[text[3:]] = sample["images"][segment]
        assert not sample["loss_mask"][segments == members].any()  # padding
    assert set(found) == set(texts.values())
    assert all(np.array_equal(found[texts[name]], pixels(image)) for name, image in images.items())


def test_a_prompt_has_the_tokens_before_the_last_answer(tmp_path: Path) -> None:
    turns = [("human", "What?"), ("gpt", "A cat."), ("human", "Big?"), ("gpt", "No.")]
    lines = [
        ({"conversations": [{"from": who, "value": text} for who, text in turns]}, "No."),
        ({"question": "What?", "answers": ["x", "yes", "yes"]}, "yes"),
        ({"caption": "a cat"}, "a cat"),
    ]
    save(tmp_path, "x.png", 0)
    path = write_lines(tmp_path, *({"image": "x.png", **line} for line, _ in lines))
    data = build(path)
    encoder = ImageTextEncoder(TOKENIZER, load_chat_template("plain", None, TOKENIZER), data.shape.image)
    records = list(read_image_texts(path, tmp_path, lambda number, error: pytest.fail(str(error))))
    prompts = [shown(encoder.prompt(record).tokens) for record in records]
    assert prompts == [
        "User: ###\nWhat?\n\nAssistant: A cat.$\n\nUser: Big?\n\nAssistant:",
        "User: ###\nWhat?\n\nAssistant:",
        "###",
    ]
    for record, prompt, (_, answer) in zip(records, prompts, lines, strict=True):
        assert answer in record.references
        assert f"{prompt} {answer}$".replace("### ", "###") == shown(encoder(record).tokens)


# -- damaged data ------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Of five records one has no file, one a file without a head, one an image that ends too early."""
    for number in range(3):
        save(tmp_path, f"{number}.png", number)
    whole = io.BytesIO()
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (16, 16, 3)).astype(np.uint8)).save(whole, "png")
    (tmp_path / "cut.png").write_bytes(whole.getvalue()[:400])
    (tmp_path / "head.png").write_bytes(b"no image")
    names = ("0", "missing", "head", "1", "cut")
    return write_lines(tmp_path, *({"image": f"{name}.png", "text": f"is {name}"} for name in names))


def test_images_without_a_range_of_values_count_as_damaged(tmp_path: Path, caplog) -> None:
    save(tmp_path, "0.png", 0)
    Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)).save(tmp_path / "float.tiff")
    path = write_lines(tmp_path, *({"image": name, "text": "is it"} for name in ("0.png", "float.tiff")))
    data = build(path, max_unusable_records=1)
    assert [bool(data[index]["loss_mask"].any()) for index in range(len(data))].count(False) == 1
    assert "float.tiff: an image of floating-point values" in caplog.text
    strict = build(path)
    with pytest.raises(DataError, match=r"float.tiff: an image of floating-point values.*data.max_unusable_records"):
        [strict[index] for index in range(len(strict))]


def test_damaged_images_are_named_counted_and_do_not_count_in_the_loss(damaged: Path, caplog) -> None:
    with pytest.raises(DataError, match=r"missing.png cannot be read.*leave such records out with data.max_unus"):
        build(damaged)
    with pytest.raises(DataError, match=r"head.png cannot be read as an image.*which is 1 \(this is number 2\)"):
        build(damaged, max_unusable_records=1)
    data = build(damaged, max_unusable_records=3)
    assert "missing.png" in caplog.text
    assert "2 unusable" in caplog.text
    caplog.clear()
    samples = {shown(data[index]["tokens"])[3:]: data[index] for index in range(len(data))}
    assert set(samples) == {"is 0", "is 1", "is cut"}
    assert not samples["is cut"]["loss_mask"].any()
    assert samples["is 0"]["loss_mask"].any()
    assert len(caplog.records) == 1  # reported once, though it was read several times
    strict = build(damaged, max_unusable_records=2)
    with pytest.raises(DataError, match=r"line 5: .*cut.png.*which is 2 \(this is number 3\)"):
        [strict[index] for index in range(len(strict))]


def test_each_thread_reports_the_number_of_its_own_unusable_record(caplog) -> None:
    unusable = UnusableRecords(2)
    other = Thread(target=unusable.add, args=(0, 2, DataError("the second")))

    class Found(set):
        """A set to which another thread adds a record as soon as it has one."""

        def add(self, record) -> None:
            super().add(record)
            if other.ident is None:
                other.start()
                other.join(0.1)  # no longer: it may have to wait for this thread

    unusable.found = Found()
    unusable.add(0, 1, DataError("the first"))
    other.join()
    assert sorted(record.args[0] for record in caplog.records) == [1, 2]


def shard_of(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_names_need_not_be_utf8(tmp_path: Path) -> None:
    """In a shard and in a folder."""
    name, content = os.fsdecode(b"caf\xe9"), io.BytesIO()
    image = save(tmp_path, f"{name}.png", 3)
    image.save(content, "png")
    shard = shard_of(tmp_path / "x.tar", {f"{name}.png": content.getvalue(), f"{name}.txt": b"text"})
    lines = write_lines(tmp_path, {"image": f"{name}.png", "text": "text"})
    for path in (shard, lines):
        assert np.array_equal(build(path)[0]["images"][0], pixels(image))


def test_bad_shards_and_records_are_named(tmp_path: Path, shards: Path) -> None:
    whole = (shards / "shapes-0.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "noise.tar").write_bytes(b"x" * 2000)
    with tarfile.open(tmp_path / "zipped.tar", "w:gz") as archive:
        archive.add(shards / "shapes-0.tar", "inner.tar")
    save(tmp_path, "x.png", 0)
    lines = {
        "images": ({"image": [3], "text": "x"}, "expected a path or a list of paths"),
        "null": ({"image": "x\0.png", "text": "x"}, "cannot be the path of a file: embedded null"),
        "surrogate": ({"image": "x\ud800.png", "text": "x"}, r"x\\ud800.png' cannot be the path of a file"),
        "marks": ({"text": "<image>"}, '"<image>" 1 times, and the number of images is 0'),
        "answers": ({"image": "x.png", "question": "?", "answers": []}, 'list of texts under "answers"'),
        "views": (
            {"image": ["x.png", "x.png"], "text": "x"},
            "2 views, more than the 1 of a sample; set data.max_images to at least 2",
        ),
    }
    cases = [
        (tmp_path / "cut.tar", "shard|archive"),
        (tmp_path / "noise.tar", "cannot be read as a tar archive.*without compression"),
        (tmp_path / "zipped.tar", "cannot be read as a tar archive.*without compression"),
        (shard_of(tmp_path / "json.tar", {"a.json": b"{"}), r"json.tar, sample 1 \(a.json\) is no JSON"),
        (shard_of(tmp_path / "none.tar", {"a.png": b""}), r"sample 1 \(a\) has png; its text is expected in json or"),
        (shard_of(tmp_path / "two.tar", {"a.txt": b"x", "a.TXT": b"y"}), "sample a has two members .* txt; rename"),
    ]
    for name, (line, words) in lines.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
        cases.append((tmp_path / f"{name}.jsonl", words))
    for path, words in cases:
        with pytest.raises(DataError, match=words):
            build(path)
    with pytest.raises(ConfigError, match=r"data.seq_length=3 has no room"):
        build(shards / "shapes-0.tar", length=3)


def test_the_index_is_built_once(shards: Path, tmp_path: Path, caplog) -> None:
    """A second run reads it: what is broken since then is found when an image is read."""
    path = tmp_path / "x.tar"
    path.write_bytes((shards / "shapes-0.tar").read_bytes())
    caplog.set_level(logging.INFO)
    first = build(path)
    again = build(path)
    assert first.fingerprint() == again.fingerprint()
    assert all(np.array_equal(first[n]["images"], again[n]["images"]) for n in range(7))
    assert len(list((tmp_path / "cache" / "mt").iterdir())) == 1


def test_all_unusable_records_count_together(tmp_path: Path) -> None:
    """Malformed, with too many images, damaged when decoded: one limit."""
    save(tmp_path, "x.png", 0)
    noise = io.BytesIO()
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (16, 16, 3)).astype(np.uint8)).save(noise, "png")
    (tmp_path / "cut.png").write_bytes(noise.getvalue()[:400])
    lines = [{"image": "x.png", "text": "fine"}, {"image": "x.png"}, {"image": ["x.png"] * 2, "text": "two"}]
    path = write_lines(tmp_path, *lines, {"image": "cut.png", "text": "cut"})
    data = build(path, max_unusable_records=2)
    with pytest.raises(DataError, match=r"line 4: .*this is number 3"):
        [data[index] for index in range(len(data))]


def test_a_corrected_image_is_used_and_a_replaced_one_is_named(tmp_path: Path) -> None:
    """The index is kept; the lines are the same."""
    save(tmp_path, "x.png", 0)
    (tmp_path / "y.png").write_bytes(b"no image")
    path = write_lines(tmp_path, *({"image": f"{name}.png", "text": name} for name in ("x", "y", "missing")))
    keys = {"max_unusable_records": 2, "max_num_tiles": 4}
    for usable, corrected in enumerate(("", "y.png", "missing.png"), 1):
        if corrected:
            save(tmp_path, corrected, usable)
        assert len(build(path, **keys)) == usable
    build(path, max_num_tiles=4)
    save(tmp_path, "x.png", 0, size=(48, 16))
    data = build(path, max_num_tiles=4)
    with pytest.raises(DataError, match=r"png has 1 x 3 views, and had 1 x 1 when the index .* delete the"):
        [data[index] for index in range(3)]
