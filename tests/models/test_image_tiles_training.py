"""`mt train` on images in tiles, from a folder of `transformers`: the loss of its model and its processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tests.infer.server.test_image_tiles import FAMILIES, SIDE, picture, reference_folder

from mt_cli.main import run

__all__ = ["picture"]
FEATURES = {"smolvlm": 4, "internvl": 9}
TILES = {
    "smolvlm": [f"data.image_longest_edge={4 * SIDE}", 'data.resample="lanczos"', 'data.image_markers="idefics3"'],
    "internvl": [
        "data.max_num_tiles=12", "data.use_thumbnail=true", 'data.resize="squash"', 'data.image_markers="internvl"',
        "data.image_mean=[0.485,0.456,0.406]", "data.image_std=[0.229,0.224,0.225]",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_loss_is_the_reference_s(family: str, picture: Path, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    model, processor, mark, image_token = reference_folder(family, folder)
    text = "see <image> and write this"
    (tmp_path / "lines.jsonl").write_text(json.dumps({"image": str(picture), "text": text}) + "\n")
    settings = [
        f"checkpoint.load={folder}", 'data.dataset_type="image_text"', "data.seq_length=256",
        f'data.train_data_path=["{tmp_path / "lines.jsonl"}"]', f"data.img_h={SIDE}", f"data.img_w={SIDE}",
        f"data.image_token_index={image_token}", f"data.image_seq_length={FEATURES[family]}", *TILES[family],
        "train.train_iters=2", "train.micro_batch_size=1", "train.num_threads=1", "logging.log_interval=1",
        "logging.progress=none", 'lr_schedule.lr_decay_style="constant"', "train.eval_iters=0",
        "optimizer.lr=1e-2", "lr_schedule.lr_warmup_iters=0",
    ]  # fmt: skip
    options = [part for setting in settings for part in ("--set", setting)]
    assert run(["train", *options, "--run-dir", str(tmp_path / "run")]) == 0
    losses = [
        line["loss"]
        for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "train"
    ]

    given = processor(text=[text.replace("<image>", mark)], images=[[Image.open(picture)]], return_tensors="pt")
    ids = torch.cat([given["input_ids"][0], torch.tensor([processor.tokenizer.eos_token_id])])
    before, after = (len(processor.tokenizer(part).input_ids) for part in text.split("<image>"))
    with torch.no_grad():
        logits = model(input_ids=ids[None], pixel_values=given["pixel_values"]).logits[0]
    places = [*range(1, before), *range(len(ids) - 1 - after, len(ids))]
    expected = F.cross_entropy(logits[[place - 1 for place in places]], ids[places])
    assert losses[0] == pytest.approx(expected.item(), rel=1e-4)
    assert losses[1] < losses[0]
