#!/bin/bash
# A vision language model: the shapes of Megatron's multimodal example.
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=${TP:-4}
LANGUAGE_MODEL=mistral_7b
DATA_TRAIN=pretrain.yaml
OPTIONS=" \
    --tensor-model-parallel-size ${TP} \
    --sequence-parallel \
    --use-distributed-optimizer \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --normalization RMSNorm --position-embedding-type rope \
    --untie-embeddings-and-output-weights --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 \
    --seq-length 576 --decoder-seq-length 1024 --max-position-embeddings 4096 --eod-mask-loss \
    --micro-batch-size 1 --global-batch-size 256 --train-iters 20000 \
    --lr 1e-3 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-fraction .01 \
    --clip-grad 1.0 --bf16 \
    --tokenizer-type MultimodalTokenizer --tokenizer-model mistral \
    --language-model-type=${LANGUAGE_MODEL} --tokenizer-prompt-format mistral \
    --img-h 336 --img-w 336 --patch-dim 14 \
    --disable-vision-class-token --freeze-LM --freeze-ViT \
    --data-path ${DATA_TRAIN} --dataloader-type external --prompt-path prompts.json \
    --save checkpoints --save-interval 1000 --ckpt-format torch \
"
torchrun --nproc_per_node 8 examples/multimodal/train.py ${OPTIONS}
