#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
: ${DATA_PATH:?the prefix of the sentences}
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes 1 --master_addr localhost --master_port 6000)
BERT_MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 512
    --max-position-embeddings 512
    --bert-no-binary-head
)
torchrun ${DISTRIBUTED_ARGS[@]} examples/bert/pretrain_bert.py ${BERT_MODEL_ARGS[@]} \
    --micro-batch-size 4 --global-batch-size 32 --train-iters 1000000 \
    --weight-decay 1e-2 --clip-grad 1.0 --fp16 --initial-loss-scale 65536 --loss-scale-window 500 \
    --lr 0.0001 --lr-decay-iters 990000 --lr-decay-style linear --min-lr 1.0e-5 --lr-warmup-fraction .01 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    --data-path $DATA_PATH --vocab-file bert-vocab.txt --split 949,50,1 --mask-prob 0.2 \
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save ckpt/bert
