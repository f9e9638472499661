"""Programs as users of Accelerate's Megatron-LM plugin write them; each returns what it printed."""

from __future__ import annotations

from typing import Any

STEPS = 3


def build(family: str) -> Any:
    """A small model of transformers with random weights, the same each time."""
    import torch
    import transformers

    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 96}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=95))
    if family == "llama":
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, intermediate_size=48, vocab_size=96, max_position_embeddings=16)
        return transformers.LlamaForCausalLM(config)
    if family == "bert":
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
        return transformers.BertForMaskedLM(
            transformers.BertConfig(**sizes, vocab_size=96, max_position_embeddings=16)
        )
    sizes = {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": 96}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def samples(family: str, count: int = 16) -> list[dict[str, Any]]:
    """Texts of ids; BERT's has masked positions, T5's a target of another length."""
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 96, (count, 16), generator=generator)
    if family == "bert":
        masked = torch.rand(ids.shape, generator=generator) < 0.3
        labels = ids.masked_fill(~masked, -100)
    elif family == "t5":
        labels = ids.flip(1)[:, :12]
    else:
        labels = ids
    seen = torch.ones_like(ids)
    return [{"input_ids": i, "attention_mask": s, "labels": x} for i, s, x in zip(ids, seen, labels, strict=True)]


def train(rank: int, world: int, family: str, fields: dict[str, Any], batch_size: int, folder: str | None) -> Any:
    """Trains, evaluates, saves and restores: losses of the steps, of the evaluation, and after the state was restored."""
    import torch
    from mt_accelerate import Accelerator
    from mt_accelerate.utils import MegatronLMDummyScheduler, MegatronLMPlugin
    from torch.utils.data import DataLoader

    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**fields), cpu=True)
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=40, warmup_num_steps=0)
    loader = DataLoader(samples(family), batch_size=batch_size)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    losses = []
    for batch, _ in zip(loader, range(STEPS), strict=False):
        with accelerator.accumulate(model):
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(outputs.loss.item())
    model.eval()
    batch = next(iter(loader))
    evaluated = model(**batch)
    restored = None
    if folder is not None:
        accelerator.save_state(folder)
        model.train()
        model(**batch)
        accelerator.load_state(folder)
        model.eval()
        restored = model(**batch).loss.item()
    logits = evaluated.logits
    size = accelerator.state.megatron_lm_plugin.global_batch_size
    return {
        "losses": losses,
        "evaluated": evaluated.loss.item(),
        "restored": restored,
        "logits": None if logits is None else logits.numpy(),
        "size": size,
        "main": accelerator.is_main_process,
        "samples": accelerator.gather_for_metrics(batch["input_ids"]).tolist(),
    }
