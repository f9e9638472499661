#!/bin/bash
# A classifier of images, on folders of them.
ARGS=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12
    --patch-dim 16 --img-h 224 --img-w 224 --num-classes 1000
    --seq-length 197 --max-position-embeddings 197
    --micro-batch-size 64 --global-batch-size 512 --train-iters 93750
    --lr 0.0005 --min-lr 0.00001 --lr-decay-style cosine --lr-warmup-iters 12500 --weight-decay 0.05
    --fp16 --data-path train val --no-data-sharding
)
python -m torch.distributed.launch --nproc_per_node=8 pretrain_vision_classify.py "${ARGS[@]}"
