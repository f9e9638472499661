"""Retrievers: that of ORQA and REALM with two towers of Megatron's BERT, those that start from the original BERT, and
small ones for a CPU. "ict" ones train on the inverse cloze task, "dpr" ones on questions with passages."""

from __future__ import annotations

from typing import Any

from mt_models.bert.presets import PRESETS as BERTS

REPORTED = [1, 5, 20, 100]
INVERSE_CLOZE = {"dataset_type": "ict", "seq_length": 256}
QUESTIONS = {"dataset_type": "dpr", "seq_length": 256, "train_hard_neg": 1}
FINETUNING = {
    "train": {"micro_batch_size": 8},
    "optimizer": {"lr": 2e-5, "weight_decay": 0.1},
    "lr_schedule": {"lr_decay_style": "linear", "lr_warmup_fraction": 0.01},
}
"""Megatron-LM's recipe for Natural Questions."""
FROM_BERT = {
    "model": {
        **BERTS["bert-base-uncased"]["model"],
        "retriever_score_scaling": True,
        "retriever_report_topk_accuracies": REPORTED,
    }
}
TINY = {
    "model": {
        "num_layers": 1,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.1,
        "biencoder_projection_dim": 64,
        "biencoder_shared_query_context_model": True,
        "retriever_score_scaling": True,
        "retriever_report_topk_accuracies": [1, 5, 20],
    },
    "train": {"micro_batch_size": 32, "train_iters": 400},
    "optimizer": {"lr": 1e-3, "min_lr": 1e-4},
    "lr_schedule": {"lr_decay_style": "cosine", "lr_warmup_iters": 40},
}
"""One tower for both: with little text two hardly agree."""

PRESETS: dict[str, dict[str, Any]] = {
    "ict-tiny": {**TINY, "data": {"dataset_type": "ict", "seq_length": 128}},
    "dpr-tiny": {**TINY, "data": {"dataset_type": "dpr", "seq_length": 128}},
    "ict-base": {
        "model": {
            "num_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "max_position_embeddings": 512,
            "biencoder_projection_dim": 128,
            "retriever_score_scaling": True,
            "retriever_report_topk_accuracies": REPORTED,
        },
        "data": INVERSE_CLOZE,
    },
    "ict-bert-base-uncased": {**FROM_BERT, "data": INVERSE_CLOZE},
    "dpr-bert-base-uncased": {**FROM_BERT, **FINETUNING, "data": QUESTIONS},
}
