"""Small models of transformers with a tokenizer, without dropout, for scripts that start from pretrained weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEXTS = ("the cat sat", "a dog ran home", "one more line of text", "so it goes on and on", "no", "yes it is")


def write_tokenizer(folder: Path, *, ends: bool) -> None:
    """Words of TEXTS. ends: texts stand between [CLS] and [SEP], as BERT has them."""
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=SPECIAL))
    if ends:
        words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names |= {"eos_token": "[SEP]"}
    inputs = ["input_ids", *(["token_type_ids"] if ends else []), "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, model_input_names=inputs, **names)
    tokenizer.save_pretrained(folder)
    # The class by the name that transformers 4 reads, too.
    path = folder / "tokenizer_config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**written, "tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")


def write_classifier(folder: Path) -> None:
    write_tokenizer(folder, ends=True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=32, max_position_embeddings=32, **sizes, **dropout)
    BertForSequenceClassification(config).save_pretrained(folder)


def write_gpt2(folder: Path) -> None:
    write_tokenizer(folder, ends=False)
    torch.manual_seed(0)
    dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(vocab_size=32, bos_token_id=2, eos_token_id=3, **sizes, **dropout)).save_pretrained(
        folder
    )


def write_llama(folder: Path) -> None:
    write_tokenizer(folder, ends=False)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=32, max_position_embeddings=32, eos_token_id=3, bos_token_id=2, pad_token_id=0, **sizes)
    ).save_pretrained(folder)
