#!/bin/bash
set -u
unset NCCL_DEBUG
export CUDA_DEVICE_MAX_CONNECTIONS=1
GLOBAL_BATCH_SIZE=16
MICRO_BATCH_SIZE=2
TRAIN_SAMPLES=100000
LR_DECAY_SAMPLES=99000
LR_WARMUP_SAMPLES=1000
ARGS=" \
  --retro-project-dir ${RETRO_PROJECT_DIR} \
  --retro-add-retriever --retro-num-neighbors 2 --retro-num-retrieved-chunks 2 --retro-encoder-layers 2 \
  --retro-encoder-hidden-dropout 0.1 --retro-encoder-attention-dropout 0.1 \
  --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 2048 --max-position-embeddings 2048 \
  --micro-batch-size ${MICRO_BATCH_SIZE} --global-batch-size ${GLOBAL_BATCH_SIZE} --train-samples ${TRAIN_SAMPLES} \
  --lr-decay-samples ${LR_DECAY_SAMPLES} --lr-warmup-samples ${LR_WARMUP_SAMPLES} --lr 6.0e-4 --min-lr 6.0e-5 --lr-decay-style cosine \
  --untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope --rotary-percent 0.5 --swiglu \
  --attention-dropout 0.0 --hidden-dropout 0.0 --normalization LayerNorm --init-method-std 0.007 \
  --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --tokenizer-type GPT2BPETokenizer \
  --eval-iters 100 --eval-interval 1260 --log-interval 100 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 \
  --no-async-tensor-model-parallel-allreduce --bf16 --no-data-sharding \
"
CMD="cd /workspace/megatron && torchrun --nproc_per_node 8 --nnodes 1 --master_addr localhost --master_port 6000 pretrain_retro.py ${ARGS}"
echo "$CMD"
eval $CMD
