#!/bin/bash
# Two steps on a CPU.
SIZE=(--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16)
python pretrain_gpt.py "${SIZE[@]}" \
    --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 --lr-decay-style constant \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 \
    --eval-interval 2 --eval-iters 1 --log-interval 1 --save ${OUT:-ckpt} --save-interval 2
