#!/bin/bash
set -euo pipefail

export NCCL_IB_TIMEOUT=22 OMP_NUM_THREADS=1
TP=${TP:-2}
PP=${PP:-1}
NNODES=${NNODES:-4}
GPUS_PER_NODE=8
DP=$((GPUS_PER_NODE * NNODES / (TP * PP)))
MBS=2
GBS=$((MBS * DP * 4))
TOKENIZER=${TOKENIZER_MODEL:-"tokenizer.model"}
DATA="${DATA_PATH:-${DATA_DIR:-/data}/corpus_text_document}"

if [ "$TP" -gt 1 ]; then
    SP="--sequence-parallel"
else
    SP=""
fi

mkdir -p logs || exit 1

torchrun --nproc-per-node=$GPUS_PER_NODE --nnodes=$NNODES --rdzv-backend=c10d --rdzv-endpoint=head:29400 pretrain_gpt.py \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP $SP \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \
    --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear \
    --position-embedding-type rope --untie-embeddings-and-output-weights \
    --hidden-dropout 0 --attention-dropout 0 --no-rope-fusion \
    --seq-length 4096 --max-position-embeddings 4096 \
    --tokenizer-type Llama2Tokenizer --tokenizer-model "$TOKENIZER" --make-vocab-size-divisible-by 1 \
    --data-path "$DATA" --micro-batch-size $MBS --global-batch-size $GBS \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --train-iters 250000 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.02 \
    --bf16 --use-flash-attn --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --log-interval 10 --eval-interval 1000 --eval-iters 20 --wandb-project "${WANDB_PROJECT}" \
    --save ckpts/llama2 --save-interval 1000 2>&1 | tee logs/train.log
