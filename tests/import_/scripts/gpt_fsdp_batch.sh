#!/bin/bash
# Submits itself: the job is a heredoc, its variables are this script's.
NODES=2
SHARDING=${SHARDING:-optim_grads_params}
PRETRAIN_ARGS=(
    --num-layers 40 --hidden-size 5120 --num-attention-heads 40
    --seq-length 2048 --max-position-embeddings 2048
    --micro-batch-size 2 --global-batch-size 256 --train-iters 1000 --lr 1e-4 --lr-warmup-iters 10
)
PRETRAIN_ARGS=(
    "${PRETRAIN_ARGS[@]}"
    --use-megatron-fsdp
    --data-parallel-sharding-strategy ${SHARDING}
    --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion
    --untie-embeddings-and-output-weights --${PRECISION:-bf16}
)
TRAINING_CMD="pretrain_gpt.py ${PRETRAIN_ARGS[*]} --mock-data --tokenizer-type NullTokenizer --vocab-size 131072 --log-interval 1"
unset CUDA_DEVICE_MAX_CONNECTIONS

sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=${NODES}
srun --ntasks-per-node=1 -N ${NODES} bash -c "torchrun --nproc-per-node 8 --nnodes ${NODES} --node-rank \$SLURM_PROCID ${TRAINING_CMD}"
EOF
