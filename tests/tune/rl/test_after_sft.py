"""`mt tune` on the run of another `mt tune`: the template and the adapter that it was trained with."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tune.rl.runs import write_task

SMALL = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.max_position_embeddings=64",
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }};{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.slow
def test_reinforcement_learning_takes_template_and_adapter_of_fine_tuning(
    mt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("template.jinja").write_text(TEMPLATE)
    question = {"role": "user", "content": "1+1="}
    answered = {"messages": [question, {"role": "assistant", "content": "2"}]}
    Path("chats.jsonl").write_text((json.dumps(answered) + "\n") * 4)
    small = [part for key in SMALL for part in ("--set", key)]
    tuned = ["tune", "sft", "gpt-tiny", "chats.jsonl", "--template", "template.jinja", "--adapter", "lora"]
    # One step is no longer than the warm-up by default.
    assert mt(*tuned, "--rank", 2, *small, "--steps", 1, "--run-dir", "sft").code == 0
    Path("template.jinja").unlink()
    prompts, judges = write_task(tmp_path)
    prompts.write_text((json.dumps({"prompt": [question]}) + "\n") * 4)
    command = ["tune", "grpo", "sft", prompts, "--reward", f"{judges}:low", "--steps", 1, "--group-size", 2]
    command += ["--batch-size", 2, "--max-completion-length", 2]
    shown = mt(*command, "--show")
    assert shown.code == 0, shown.err
    config = tomllib.loads(shown.out)
    assert Path(config["data"]["chat_template_file"]).read_text() == TEMPLATE
    assert config["adapter"] == {"type": "lora", "rank": 2, "alpha": 4.0}
    assert (config["lr_schedule"]["lr_warmup_iters"], config["optimizer"]["lr"]) == (0, pytest.approx(1e-5))
    trained = mt(*command, "--run-dir", "grpo")
    assert trained.code == 0, trained.err
    # What was drawn is behind the prompt as the template writes it.
    line = json.loads(Path("grpo/rollouts.jsonl").read_text().splitlines()[0])
    assert line["prompt"] == [question]

    # A conversion counts what it writes, and the tensors of one layer, the embeddings and the last norm are the base.
    written = mt("convert", "--load-dir", "grpo", "--save-dir", "peft", "--saver", "peft")
    assert written.code == 0, written.err
    import safetensors.torch

    count = sum(tensor.numel() for tensor in safetensors.torch.load_file("peft/adapter_model.safetensors").values())
    assert f"{count:,} parameters of a gpt model" in written.out
    assert "other 8 tensors are left to another file" in written.out
