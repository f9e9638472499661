# Sizes of Llama 3.1 70B; what the launcher has set stays.
if [ -z ${TP} ]; then
    TP=4
fi
if [ -z ${CP} ]; then
    CP=2
fi

MODEL_ARGS=" \
    --num-layers 80 \
    --hidden-size 8192 \
    --ffn-hidden-size 28672 \
    --num-attention-heads 64 \
    --group-query-attention \
    --num-query-groups 8 \
    --max-position-embeddings 131072 \
    --position-embedding-type rope \
    --rotary-base 500000 \
    --use-rope-scaling \
    --rope-scaling-factor 8.0 \
    --swiglu --normalization RMSNorm --disable-bias-linear \
    --untie-embeddings-and-output-weights --no-masked-softmax-fusion \
    --attention-dropout 0.0 --hidden-dropout 0.0 \
    --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model ${TOKENIZER_MODEL:-meta-llama/Llama-3.1-70B} \
    --bf16 \
"
