#!/usr/bin/env bash
#SBATCH --job-name=webrl
#SBATCH --nodes=32
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=webrl-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
# Qwen3-VL-8B on 32 nodes of 8 GPUs, from the root of the repository:
#   sbatch launch/slurm/train_32node.sh run.name=mine trainer.updates=100
# Other sizes: train_nodes.sh. Ask for one or two spare nodes (sbatch --nodes=34), so that a bad node does not end the job.
cd "${SLURM_SUBMIT_DIR:-.}"
source launch/slurm/common.sh
run_job "${CONFIG:-configs/8b_32node.yaml}" "$@"
