"""Transformers on the exported folder against mt: python same_text.py FOLDER ANSWERS.jsonl

ANSWERS are greedy answers that `mt generate --output` wrote. The exit code is 1 where transformers gives another text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: Path, answers: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    other = [line["prompt"] for line in lines if text_of(model, tokenizer, line) != line["completions"][0]["text"]]
    print(f"transformers gives the same text for {len(lines) - len(other)} of {len(lines)} questions")
    if other:
        raise SystemExit(f"another text for: {other[0]!r}")


def text_of(model: Any, tokenizer: Any, line: dict[str, Any]) -> str:
    """The greedy continuation of the prompt, as many tokens at most as mt generated."""
    inputs = tokenizer(line["prompt"], return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=max(line["completions"][0]["tokens"], 1))
    text: str = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
