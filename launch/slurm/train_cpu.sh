#!/usr/bin/env bash
#SBATCH --job-name=webrl
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=webrl-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
# A tiny Qwen3-VL on any number of nodes without GPUs, one engine and one trainer rank on each:
#   sbatch --nodes=2 launch/slurm/train_cpu.sh trainer.updates=10
cd "${SLURM_SUBMIT_DIR:-.}"
source launch/slurm/common.sh
nodes=${SLURM_JOB_NUM_NODES:-1}
run_job "${CONFIG:-configs/quickstart.yaml}" cluster.nodes="$nodes" trainer.data_parallel="$nodes" rollout.engines="$nodes" "$@"
