"""`mt generate` of models that take more than text: T5, whose prompt the encoder reads, and LLaVA with image files."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.infer.engines import randomize

from mt_cli.main import run
from mt_core.config.loading import config_from_dict
from mt_core.interfaces import SplitRequest
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train import build
from mt_data.datasets.images.image_text import ImageTextDataConfig, build_image_text
from mt_data.datasets.images.pixels import ImageFile
from mt_data.datasets.images.shapes import draw
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.prompts import IMAGES, WHOLE, PromptEncoder, all_views, deal_images, read_images
from mt_infer.requests import FinishReason
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
GREEDY = SamplingParameters(temperature=0.0, max_tokens=6)


@cache
def host() -> PluginHost:
    return load_plugins()


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's run after one step."""
    path = tmp_path_factory.mktemp("runs") / "llava"
    few = [
        "lr_schedule.lr_warmup_iters=0",
        "train.train_iters=1",
        "train.micro_batch_size=2",
        "train.eval_iters=1",
        "train.sample_tokens=2",
        "train.sample_prompt=null",
    ]
    overrides = [part for override in few for part in ("--set", override)]
    assert run(["train", str(EXAMPLES / "llava.toml"), *overrides, "--run-dir", str(path)]) == 0
    return path


def picture(folder: Path, index: int) -> tuple[Path, np.ndarray]:
    pixels = draw(40, 32, seed=0, split="test", index=index).pixels
    np.save(folder / f"{index}.npy", pixels)
    return folder / f"{index}.npy", pixels


def test_an_image_file_stands_where_the_prompt_says(llava: Path, tmp_path: Path, capsys) -> None:
    """The command gives what the model gives for features spliced into ids by hand."""
    path, pixels = picture(tmp_path, 0)
    options = ["--temperature", "0", "--max-tokens", "6"]
    assert run(["generate", str(llava), "--prompt", "see <image>:", "--image", str(path), *options]) == 0
    shown = capsys.readouterr().out
    generator = TextGenerator.load(llava, device="cpu")
    model, config = generator.model, generator.config
    # 40 x 32 pixels: the middle 32 rows, colours from -1 to 1.
    images = torch.from_numpy((pixels[4:36].astype(np.float32) / 255 - 0.5) / 0.5).permute(2, 0, 1)[None]
    encode = generator.tokenizer.encode
    tokens = [*encode("see "), *[config.model.image_token_index] * 16, *encode(":")]
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]), images)[0, -1].argmax()))
    assert shown == "see <image>:" + generator.tokenizer.decode(tokens[-6:]) + "\n"


def test_a_text_with_images_begins_once() -> None:
    class BeginsTexts(Bytes):
        def encode(self, text: str) -> list[int]:
            return [258, *super().encode(text)]

    model = SimpleNamespace(image_token_index=300)
    data = ImageTextDataConfig(image_token_index=300, image_seq_length=2)
    encoder = PromptEncoder(BeginsTexts(), SimpleNamespace(model=model, data=data), ["images"])
    assert encoder.with_images("a<image>b", [WHOLE]) == [258, ord("a"), 300, 300, ord("b")]
    assert encoder.with_images("b", [WHOLE]) == [258, 300, 300, ord("b")]


def test_images_are_dealt_to_prompts_in_order() -> None:
    paths = [Path(name) for name in "abc"]
    assert deal_images(["<image><image>", "x", "<image>"], paths) == [paths[:2], [], paths[2:]]
    assert deal_images(["x"], paths) == [paths]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "a <image>", "--prompt", "b", *["--image", "0.npy"] * 2], "<image> 1 times, and .* images is 2"),
        (["--prompt", "<image><image>", "--image", "0.npy"], "<image> 2 times, and the number of images is 1"),
        (["--prompt", "x", "--image", "none.npy"], "none.npy cannot be read: No such file"),
    ],
)
def test_images_that_do_not_fit_are_refused(llava: Path, tmp_path: Path, monkeypatch, capsys, arguments, words) -> None:
    picture(tmp_path, 0)
    monkeypatch.chdir(tmp_path)
    assert run(["generate", str(llava), *arguments]) in (2, 4)
    assert re.search(words, re.sub(r"\s+", " ", capsys.readouterr().err))


def t5() -> TextGenerator:
    """Of a random model over the ids of bytes."""
    config = config_from_dict(
        {"model": {"family": "t5", **SHAPE, "vocab_size": 264}, "inference": {"cache_memory_gb": 0.01}}, host()
    )
    model = build.build_model(config, ParallelContext(), host())
    initialize(model, 1, ParallelContext())
    randomize(model)
    return TextGenerator.of_model(model.eval(), Bytes(), config, ParallelContext())


class Bytes:
    """T5's special tokens behind the bytes."""

    def __init__(self) -> None:
        from mt_core.interfaces import SpecialTokens

        self.special = SpecialTokens(pad=256, eos=257)
        self.vocab_size = 264

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("latin-1")


def test_a_prompt_is_what_the_encoder_reads() -> None:
    generator = t5()
    model = generator.model
    ((found,),) = generator.generate(["a bridge"], GREEDY)
    tokens = [256]
    for _ in range(6):
        with torch.no_grad():
            logits = model(torch.tensor([list(b"a bridge")]), torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    assert found.tokens == tokens[1:]
    given = {"encoder_tokens": torch.tensor([list(b"a bridge")])}
    ((rest,),) = generator.generate([tokens[:3]], SamplingParameters(temperature=0.0, max_tokens=4), [given])
    assert rest.tokens == tokens[3:]


def test_a_decoder_ends_with_eos() -> None:
    """The last token of the greedy text is made the end."""
    generator = t5()
    ((found,),) = generator.generate(["a bridge"], GREEDY)
    generator.tokenizer.special = type(generator.tokenizer.special)(pad=256, eos=found.tokens[-1])
    ((ended,),) = generator.generate(["a bridge"], GREEDY)
    assert (ended.tokens, ended.finish) == (found.tokens[: found.tokens.index(found.tokens[-1])], FinishReason.STOP)


def test_a_prompt_has_the_tiles_of_training(tmp_path: Path) -> None:
    """Ids and views of a text with a wide image are those of the data set's sample."""
    np.save(tmp_path / "wide.npy", np.random.RandomState(0).randint(0, 256, (8, 24, 3)).astype(np.uint8))
    (tmp_path / "x.jsonl").write_text('{"image": "wide.npy", "text": "a <image> b"}\n')
    keys = {"img_h": 8, "img_w": 8, "max_num_tiles": 4, "use_thumbnail": True, "image_token_index": 261}
    data = ImageTextDataConfig.model_validate(
        {**keys, "image_seq_length": 2, "train_data_path": [str(tmp_path / "x.jsonl")]}
    )
    tokenizer = ByteLevelTokenizer()
    sample = build_image_text(data, tokenizer, SplitRequest("train", 1, 32, seed=1))[0]
    model = SimpleNamespace(image_token_index=261, vocab_size=None)
    encoder = PromptEncoder(tokenizer, SimpleNamespace(model=model, data=data), (IMAGES,))
    images = read_images([ImageFile(tmp_path / "wide.npy")], data)
    ids = encoder.with_images("a <image> b", [image.grid for image in images])
    assert ids == sample["tokens"][: len(ids)].tolist()
    assert ids.count(261) == 4 * 2
    assert torch.equal(all_views(images), torch.from_numpy(sample["images"][:4]))
