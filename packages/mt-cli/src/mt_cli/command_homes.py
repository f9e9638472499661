"""The distribution of every command of mt; written by `scripts/command_homes.py`."""

COMMAND_HOMES = {
    "bench": "mt-tools",
    "bench generate": "mt-infer",
    "chat": "mt-infer",
    "ckpt": "mt-ckpt",
    "convert": "mt-ckpt",
    "ctl": "mt-ops",
    "data": "mt-data",
    "estimate": "mt-tools",
    "eval": "mt-eval",
    "generate": "mt-infer",
    "import": "mt-import",
    "launch": "mt-accelerate",
    "moe": "mt-moe",
    "plan": "mt-tools",
    "quantization": "mt-infer",
    "retrieve": "mt-retrieval",
    "retro": "mt-retrieval",
    "serve": "mt-infer",
    "verify": "mt-tools",
    "verify generation": "mt-infer",
}
