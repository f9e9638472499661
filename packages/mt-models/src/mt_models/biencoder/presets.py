"""The retriever of ORQA and REALM: two towers of BERT's base size, embeddings of 128."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "ict-base": {
        "model": {
            "num_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "max_position_embeddings": 512,
            "biencoder_projection_dim": 128,
            "retriever_score_scaling": True,
        },
        "data": {"dataset_type": "ict", "seq_length": 256},
    },
}
