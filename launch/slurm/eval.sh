#!/usr/bin/env bash
#SBATCH --job-name=webrl-eval
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=webrl-eval-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Evaluates a checkpoint on held-out tasks, with engines on all GPUs of any number of nodes; takes the arguments of
# `webrl eval`:
#   sbatch --nodes=4 --gpus-per-node=8 launch/slurm/eval.sh runs/8b_32node --episodes 50 --json result.json
# The configuration of a training job needs no overrides: cluster.nodes becomes the number of nodes of this job.
cd "${SLURM_SUBMIT_DIR:-.}"
source launch/slurm/common.sh
run_evaluation "$@"
