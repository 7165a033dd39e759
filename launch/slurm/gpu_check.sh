#!/usr/bin/env bash
#SBATCH --job-name=webrl-gpu-check
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=02:30:00
#SBATCH --no-requeue
#SBATCH --output=webrl-gpu-check-%j.log
# Checks nodes of 8 GPUs with each other, and the first one with `webrl check gpu`; then runs a short job with the layout
# of the configuration on as many of them as it has, from the root of the repository:
#   sbatch launch/slurm/gpu_check.sh
#   CONFIG=my_4node.yaml sbatch --nodes=5 launch/slurm/gpu_check.sh
#   GPU_CHECK_OPTIONS=--quick sbatch --nodes=1 --time=00:30:00 launch/slurm/gpu_check.sh
# The report is runs/gpu-check-<job>/gpu-check.json. docs/checking.md
cd "${SLURM_SUBMIT_DIR:-.}"
source launch/slurm/common.sh
run_gpu_check "${CONFIG:-configs/8b_1node.yaml}" "$@"
