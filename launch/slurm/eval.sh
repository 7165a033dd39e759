#!/usr/bin/env bash
#SBATCH --job-name=webrl-eval
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=webrl-eval-%j.log
# Evaluates a checkpoint on held-out tasks, on one node; takes the arguments of `webrl eval`:
#   sbatch --gpus-per-node=8 launch/slurm/eval.sh runs/8b_32node --episodes 50 --json result.json
# A configuration of several nodes needs these overrides: cluster.nodes=1 rollout.engines=0 trainer.data_parallel=0
cd "${SLURM_SUBMIT_DIR:-.}"
source launch/slurm/common.sh
if [ -n "${DRY_RUN:-}" ]; then
    echo "$PYTHON -m megatron_webrl.cli eval $*"
    exit
fi
run_on "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" eval "$@"
