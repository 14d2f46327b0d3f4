#!/usr/bin/env bash
# The lines of qwen3_32b_npu.sh around the training, on 2 CPU processes over gloo, with a small GPT of real Megatron-core.
#
#     bash examples/launch/gpt_cpu.sh
#     ITERATIONS=20 COC_VERIFY=10 COC_TIMELINE=timeline bash examples/launch/gpt_cpu.sh
set -euo pipefail

# The two lines that switch overlap on.
export COC_PARALLEL_NUM=${COC_PARALLEL_NUM:-auto}
export USE_COC_FUSED_KERNEL=${USE_COC_FUSED_KERNEL:-0}

ascend-parallel doctor
export OMP_NUM_THREADS=1

torchrun --nproc_per_node 2 "$(dirname "$0")/../gpt/train.py" --tensor-model-parallel-size 2 --sequence-parallel \
    --transformer-impl local --steps "${ITERATIONS:-10}"

if [ -n "${COC_TIMELINE:-}" ]; then ascend-parallel timeline "$COC_TIMELINE"; fi
