"""Drawn shapes with their names, as shards that webdataset writes."""

from __future__ import annotations

import random
from pathlib import Path

import webdataset
from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (235, 215, 40)}
KINDS = ("circle", "square", "triangle")


def draw_shape(chance: random.Random, size: int = 16) -> tuple[Image.Image, str]:
    """A picture, and "red circle"."""
    kind, colour = chance.choice(KINDS), chance.choice(list(COLOURS))
    grey = chance.randrange(60)
    image = Image.new("RGB", (size, size), (grey, grey, grey))
    pen = ImageDraw.Draw(image)
    radius = size * chance.uniform(0.3, 0.42)
    x, y = (size / 2 + chance.uniform(-1, 1) for _ in "xy")
    box = (x - radius, y - radius, x + radius, y + radius)
    if kind == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    elif kind == "square":
        pen.rectangle(box, fill=COLOURS[colour])
    else:
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=COLOURS[colour])
    return image, f"{colour} {kind}"


def write_questions(path: Path, samples: int, seed: int) -> None:
    """A shard of pictures with {"question": "What?", "answer": name}."""
    chance = random.Random(seed)
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(samples):
            image, name = draw_shape(chance)
            writer.write({"__key__": f"{number:05}", "png": image, "json": {"question": "What?", "answer": name}})
