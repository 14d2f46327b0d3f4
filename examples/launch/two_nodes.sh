#!/usr/bin/env bash
# Starts an unchanged training script on several nodes by torchrun, with overlapped linear layers. Run it on every node:
#     NODE_RANK=0 MASTER_ADDR=<first node> bash two_nodes.sh pretrain_gpt.py --tensor-model-parallel-size 8 ...
#     NODE_RANK=1 MASTER_ADDR=<first node> bash two_nodes.sh pretrain_gpt.py --tensor-model-parallel-size 8 ...
# NNODES (2), NPROC (8, processes of a node) and MASTER_PORT (29500) may be set. slurm.sh runs this script on each node.
set -euo pipefail

# The two lines that switch overlap on: the same on every node.
export COC_PARALLEL_NUM=${COC_PARALLEL_NUM:-auto}
export USE_COC_FUSED_KERNEL=${USE_COC_FUSED_KERNEL:-0}

ascend-parallel doctor
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

torchrun --nnodes "${NNODES:-2}" --nproc_per_node "${NPROC:-8}" --node_rank "${NODE_RANK:?}" \
    --master_addr "${MASTER_ADDR:?}" --master_port "${MASTER_PORT:-29500}" "$@"

# The records of all nodes lie in one folder, which the nodes share; one node draws them.
if [ -n "${COC_TIMELINE:-}" ] && [ "$NODE_RANK" = 0 ]; then ascend-parallel timeline "$COC_TIMELINE"; fi
