#!/usr/bin/env bash
# Latent attention and fine-grained experts with a shared one, of a size by its name.
MODEL_SIZE=${MODEL_SIZE:-16b}
case "$MODEL_SIZE" in
    16b)
        LAYERS=27 HIDDEN=2048 HEADS=16
        FFN=10944; MOE_FFN=1408; EXPERTS=64; TOPK=6; Q_LORA=()
        ;;
    "671b" | full)
        LAYERS=61; HIDDEN=7168; HEADS=128
        FFN=18432; MOE_FFN=2048; EXPERTS=256; TOPK=8; Q_LORA=(--q-lora-rank 1536)
        ;;
    *)
        echo "unknown size"; exit 1
        ;;
esac

run() {
    torchrun --nproc_per_node=8 --nnodes=2 --node_rank=${NODE_RANK:-0} --master_addr=host0 --master_port=29500 pretrain_gpt.py "$@"
}

MLA_ARGS=(
    --multi-latent-attention --qk-layernorm
    --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    "${Q_LORA[@]}"
    --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --rotary-base 10000
)

run --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads $HEADS --ffn-hidden-size $FFN \
    --seq-length 4096 --max-position-embeddings 163840 --position-embedding-type rope \
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear \
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0 \
    "${MLA_ARGS[@]}" \
    --num-experts $EXPERTS --moe-ffn-hidden-size $MOE_FFN --moe-router-topk $TOPK \
    --moe-layer-freq "([0]*1+[1]*$((LAYERS-1)))" \
    --moe-shared-expert-intermediate-size $((2*MOE_FFN)) \
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 \
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 \
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 \
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion \
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 \
    --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --use-distributed-optimizer --overlap-grad-reduce --bf16 \
    --recompute-granularity selective --recompute-modules mla_up_proj moe \
    --micro-batch-size 1 --global-batch-size 512 --train-iters 50000 --lr 4.2e-4 --min-lr 4.2e-5 \
    --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V2-Lite \
    --data-path corpus_text_document --eval-interval 1000 --eval-iters 10 \
    --save /ckpts/dsv2 --save-interval 500 --log-interval 1
