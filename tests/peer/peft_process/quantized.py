"""QLoRA as transformers, bitsandbytes and PEFT compute it, on a CPU. `python quantized.py write BASE FOLDER [plain]`
saves a model in nf4; `python quantized.py compute FOLDER ADAPTER TOKENS.json OUT` writes `logits` and `grad.NAME` of
the mean loss of the next tokens, with the adapter of a PEFT folder on it."""

from __future__ import annotations

import json
import sys
import warnings

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

warnings.simplefilter("ignore")


def write(base: str, folder: str, *plain: str) -> None:
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=not plain,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=settings, device_map="cpu", attn_implementation="eager"
    )
    model.save_pretrained(folder)


def compute(folder: str, adapter: str, tokens: str, out: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu", attn_implementation="eager"
    )
    # In evaluation bitsandbytes rounds weights once more, for products in bf16 on a CPU. There is no dropout.
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True).train()
    with open(tokens, encoding="utf-8") as file:
        ids = torch.tensor(json.load(file))
    logits = model(input_ids=ids).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    found = {"logits": logits.detach().float()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"grad.{name.replace('.default', '')}"] = parameter.grad.float()
    save_file({name: value.contiguous() for name, value in found.items()}, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"write": write, "compute": compute}[sys.argv[1]](*sys.argv[2:])
