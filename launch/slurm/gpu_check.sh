#!/usr/bin/env bash
#SBATCH --job-name=webrl-gpu-check
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=01:00:00
#SBATCH --output=webrl-gpu-check-%j.log
# Checks nodes of 8 GPUs with each other, and the first one with `webrl check gpu`, from the root of the repository:
#   sbatch launch/slurm/gpu_check.sh
#   CONFIG=my_1node.yaml sbatch --nodes=4 launch/slurm/gpu_check.sh
# The configuration is for one node. The report is runs/gpu-check-<job>/gpu-check.json. docs/checking.md
cd "${SLURM_SUBMIT_DIR:-.}"
source launch/slurm/common.sh
run_gpu_check "${CONFIG:-configs/8b_1node.yaml}" "$@"
