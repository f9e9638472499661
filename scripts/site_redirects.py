"""Hook of mkdocs that writes a page at the former address of each page that has moved, which leads to the new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GUIDES = (
    "add-a-model",
    "checkpoints",
    "containers",
    "context-parallel",
    "convert",
    "custom-loops",
    "finetuning-tasks",
    "fp8",
    "from-accelerate",
    "from-megatron",
    "instruct-retro",
    "kernels",
    "launching",
    "logging",
    "megatron-checkpoints",
    "moe",
    "multimodal",
    "optimizers",
    "parallelism",
    "pipeline",
    "plugins",
    "python",
    "quantization",
    "retriever",
    "retro",
    "sampling",
    "upcycling",
)
MOVED = {"own-text": "tutorials/own-text", **{name: f"guides/{name}" for name in GUIDES}}
"""Former address -> address, without the ending of the file. Anchors of the former page are kept."""

PAGE = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{target}">
<script>location.replace("{target}" + location.hash)</script>
<meta http-equiv="refresh" content="0; url={target}">
<a href="{target}">This page has moved.</a>
"""


def on_post_build(config: Any) -> None:
    site = Path(config["site_dir"])
    for former, address in MOVED.items():
        if not (site / address / "index.html").exists():
            raise FileNotFoundError(f"{former} is said to have moved to {address}, which the site does not have")
        folder = site / former
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text(PAGE.format(target=f"../{address}/"), encoding="utf-8")
