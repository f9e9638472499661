#!/bin/bash
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=8

DIR=`pwd`
DATETIME=`date +'date_%y-%m-%d_time_%H-%M-%S'`
mkdir -p $DIR/logs

options=" \
	--tensor-model-parallel-size 8 \
	--pipeline-model-parallel-size 8 \
	--num-layers-per-virtual-pipeline-stage 5 \
	--sequence-parallel \
	--num-layers 80 \
	--hidden-size 8192 \
	--ffn-hidden-size 28672 \
	--num-attention-heads 64 \
	--group-query-attention \
	--num-query-groups 8 \
	--swiglu --normalization RMSNorm --disable-bias-linear \
	--use-rotary-position-embeddings --untie-embeddings-and-output-weights \
	--hidden-dropout 0.0 --attention-dropout 0.0 \
	--seq-length 4096 --max-position-embeddings 4096 \
	--micro-batch-size 1 --global-batch-size 1024 --train-samples 244140625 \
	--lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-samples 2048000 \
	--weight-decay 0.1 --adam-beta2 0.95 \
	--tokenizer-type Llama2Tokenizer --tokenizer-model /models/tokenizer.model \
	--data-path ${DATA} --split 99,1,0 \
	--recompute-granularity full --recompute-method block --recompute-num-layers 2 \
	--bf16 --use-distributed-optimizer --overlap-grad-reduce \
	--eval-interval 500 --eval-iters 8 --log-interval 1 \
	--save /ckpt/llama --load /ckpt/llama --save-interval 500 --exit-duration-in-mins 230 \
	--tensorboard-dir $DIR/tb/$DATETIME "

run_cmd="python -u pretrain_gpt.py $@ ${options}"

srun --nodes=32 --ntasks-per-node=8 --container-image nvcr.example/pytorch -l \
     --output=$DIR/logs/%x_%j_$DATETIME.log sh -c "${run_cmd}"

set +x
