"""Small runs of reinforcement learning for tests."""

from __future__ import annotations

import json
from pathlib import Path

from mt_core.config import load_config
from mt_core.config.loading import LoadedConfig

DROPOUT = ("model.hidden_dropout=0", "model.attention_dropout=0")
"""Keys of the family gpt."""
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
REWARDS = '''
def right(completions, answer, **_):
    """Also something for a digit, so that groups of an untrained model differ."""
    return [float(text == want) + 0.1 * sum(ord(c) for c in text) / 256 for text, want in zip(completions, answer)]


def low(completion_ids, **_):
    """The share of tokens with a number below 64."""
    return [sum(token < 64 for token in ids) / len(ids) for ids in completion_ids]


def equal(completions, **_):
    return [0.25] * len(completions)


def short(completions, **_):
    return [0.25] * (len(completions) - 1)


def not_a_number(completions, **_):
    return [float("nan")] * len(completions)
'''


def write_task(folder: Path) -> tuple[Path, Path]:
    """Files of prompts and of rewards."""
    prompts, rewards = folder / "prompts.jsonl", folder / "judges.py"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in SUMS))
    rewards.write_text(REWARDS)
    return prompts, rewards


def config(folder: Path, *overrides: str, reward: str = "right") -> LoadedConfig:
    prompts, rewards = folder / "prompts.jsonl", folder / "judges.py"
    if not rewards.exists():
        write_task(folder)
    small = ("num_layers=2", "hidden_size=16", "num_attention_heads=4", "max_position_embeddings=64")
    keys = [
        *(f"model.{key}" for key in small),
        *(() if any(one.startswith("model.family=") for one in overrides) else DROPOUT),
        "data.dataset_type=prompts",
        f"data.data_path=[{json.dumps(str(prompts))}]",
        'data.split="12,4,0"',
        "data.seq_length=16",
        "train.loss=policy",
        "train.batch_source=rollouts",
        "train.loss_normalization=tokens",
        "train.global_batch_size=8",
        "train.micro_batch_size=2",
        "train.train_iters=3",
        "train.eval_iters=1",
        "train.sample_prompt=null",
        "rl.group_size=4",
        "rl.max_completion_length=5",
        f"rewards.modules=[{json.dumps(str(rewards))}]",
        f'rewards.functions=["judges:{reward}"]',
        "rewards.workers=0",
        "optimizer.lr=0.01",
        "logging.log_interval=1",
    ]
    return load_config(preset="gpt-tiny", overrides=[*keys, *overrides])
