#!/usr/bin/env bash
# Trains Qwen3 32B with MindSpeed-LLM, tensor parallel 8 with sequence parallelism, with overlapped linear layers.
#
# For 2 nodes of 8 NPUs; start it in a checkout of MindSpeed-LLM on each node:
#     NODE_RANK=0 MASTER_ADDR=<first node> DATA=<data> TOKENIZER=<tokenizer> LOAD=<weights> SAVE=<folder> bash qwen3_32b_npu.sh
# Tried: its arguments, with MindSpeed's parser. Not tried: a run, since no NPU was at hand. gpt_cpu.sh runs the same
# lines on CPUs.
set -euo pipefail

# The two lines that switch overlap on. MindSpeed's own switches stay off: no --use-ascend-coc, no --use-ascend-mc2.
export COC_PARALLEL_NUM=${COC_PARALLEL_NUM:-auto}
export USE_COC_FUSED_KERNEL=${USE_COC_FUSED_KERNEL:-0}

# A first, short run: ITERATIONS=20 COC_VERIFY=10 COC_TIMELINE=timeline bash qwen3_32b_npu.sh
ascend-parallel doctor
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron wants it with tensor parallelism: collectives start in the order of calls

MODEL="--use-mcore-models --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --transformer-impl local \
    --num-layers 64 --hidden-size 5120 --ffn-hidden-size 25600 --num-attention-heads 64 --kv-channels 128 \
    --group-query-attention --num-query-groups 8 --qk-layernorm --swiglu --normalization RMSNorm --norm-epsilon 1e-6 \
    --position-embedding-type rope --rotary-base 1000000 --disable-bias-linear --untie-embeddings-and-output-weights \
    --make-vocab-size-divisible-by 1 --padded-vocab-size 151936 --max-position-embeddings 4096"
PARALLEL="--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 2 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --distributed-backend nccl"
TRAIN="--bf16 --seq-length 4096 --micro-batch-size 2 --global-batch-size 256 --train-iters ${ITERATIONS:-2000} \
    --lr 1.25e-6 --min-lr 1.25e-7 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --seed 42 \
    --attention-dropout 0.0 --hidden-dropout 0.0 --attention-softmax-in-fp32 --no-masked-softmax-fusion \
    --no-gradient-accumulation-fusion --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu \
    --use-rotary-position-embeddings --use-fused-rotary-pos-emb"
FILES="--tokenizer-type PretrainedFromHF --tokenizer-name-or-path ${TOKENIZER:?} --data-path ${DATA:?} --split 100,0,0 \
    --load ${LOAD:?} --save ${SAVE:?} --ckpt-format torch --enable-hf2mg-convert --model-type-hf qwen3 \
    --log-interval 1 --save-interval 500 --eval-interval 500 --eval-iters 0 --log-throughput"

# The arguments are lists of words.
# shellcheck disable=SC2086
torchrun --nproc_per_node 8 --nnodes 2 --node_rank "${NODE_RANK:?}" --master_addr "${MASTER_ADDR:?}" --master_port 6000 \
    pretrain_gpt.py $MODEL $PARALLEL $TRAIN $FILES

if [ -n "${COC_TIMELINE:-}" ]; then ascend-parallel timeline "$COC_TIMELINE"; fi
