#!/bin/bash
# Reinforcement learning of a Llama.
torchrun --nproc-per-node 8 train_rl.py \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear \
    --position-embedding-type rope --untie-embeddings-and-output-weights \
    --seq-length 4096 --max-position-embeddings 8192 \
    --tensor-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 64 --train-samples 64000 \
    --lr 1e-6 --lr-decay-style constant --bf16 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model llama \
    --perform-rl-step --grpo-group-size 16 --grpo-kl-beta 0.0 --langrl-env-config envs.yaml --mock-data
