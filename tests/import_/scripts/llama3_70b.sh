#!/bin/bash
# The model comes from another file, the launcher is a variable.
SCRIPT_DIR="$(dirname "$0")"
PP=4
MLM_MODEL_CFG=${1:-llama3_70b}
source "${SCRIPT_DIR}/conf/${MLM_MODEL_CFG}.sh"

NODES=8
LAUNCH_SCRIPT="torchrun --nproc_per_node=$((TP * CP)) --nnodes ${NODES} --node_rank ${SLURM_NODEID}"
TRAIN_ARGS=(--micro-batch-size 1 --global-batch-size 512 --seq-length 8192 --train-iters 10000)
TRAIN_ARGS=("${TRAIN_ARGS[@]}" --lr 8e-5 --min-lr 8e-7 --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 1000 --lr-warmup-iters 500)

${LAUNCH_SCRIPT} pretrain_gpt.py \
    ${MODEL_ARGS} \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --context-parallel-size ${CP} --cp-comm-type p2p \
    --sequence-parallel \
    --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce \
    --recompute-granularity selective --recompute-modules core_attn mlp \
    "${TRAIN_ARGS[@]}" \
    --train-data-path 0.5 a_text_document 0.5 b_text_document --valid-data-path c_text_document --test-data-path c_text_document \
    --pretrained-checkpoint /models/llama3_70b --finetune \
    --save /ckpts/run1 --save-interval 200 --save-retain-interval 1000 --async-save \
    --eval-iters 4 --eval-interval 200 --log-interval 1 --seed 42 $EXTRA
