#!/bin/bash
# T5 with 220M parameters
export CUDA_DEVICE_MAX_CONNECTIONS=1
CHECKPOINT_PATH=$1
VOCAB_FILE=$2
DATA_PATH=$3
DISTRIBUTED_ARGS="
    --nproc_per_node 8 \
    --nnodes 1 \
    --node_rank 0 \
    --master_addr localhost \
    --master_port 6000
"
T5_ARGS="
    --encoder-num-layers 12 \
    --decoder-num-layers 12 \
    --hidden-size 768 \
    --num-attention-heads 12 \
    --kv-channels 64 \
    --ffn-hidden-size 3072 \
    --encoder-seq-length 512 \
    --decoder-seq-length 128 \
    --max-position-embeddings 512 \
    --micro-batch-size 64 \
    --global-batch-size 512 \
    --lr 0.0001 \
    --train-iters 1000000 \
    --lr-decay-iters 1000000 \
    --lr-decay-style linear \
    --min-lr 0.00001 \
    --weight-decay 1e-2 \
    --lr-warmup-fraction .01 \
    --clip-grad 1.0 \
    --bf16 \
    --vocab-extra-ids 100 \
    --init-method-std 0.015 \
    --transformer-impl transformer_engine
"
torchrun $DISTRIBUTED_ARGS pretrain_t5.py $T5_ARGS \
    --tensor-model-parallel-size 1 \
    --data-path $DATA_PATH --vocab-file $VOCAB_FILE --tokenizer-type BertWordPieceCase --split 99982,9,9 \
    --log-interval 100 --save-interval 500 --eval-interval 1000 --eval-iters 10 \
    --distributed-backend nccl --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH
