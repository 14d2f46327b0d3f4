#!/usr/bin/env bash
#SBATCH --job-name=overlapped
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Runs two_nodes.sh once on each node of a Slurm job; torchrun starts the node's processes. Submit it in the checkout:
#     sbatch examples/launch/slurm.sh pretrain_gpt.py --tensor-model-parallel-size 8 ...
# Ask for the node's devices as your cluster has them (--gres=npu:8, --gpus-per-node=8).
# Tried with stand-ins for srun and scontrol (tests/docs/test_launch_scripts.py), not on a Slurm cluster.
set -euo pipefail

# The two lines that switch overlap on.
export COC_PARALLEL_NUM=${COC_PARALLEL_NUM:-auto}
export USE_COC_FUSED_KERNEL=${USE_COC_FUSED_KERNEL:-0}

# sed reads to the end: after head, scontrol's next write would fail and end the job.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR NNODES=$SLURM_JOB_NUM_NODES

# --export=ALL hands the variables to every node; without it a site's default may hand them to none.
srun --export=ALL --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$0" "$@"' "$SLURM_SUBMIT_DIR/examples/launch/two_nodes.sh" "$@"
