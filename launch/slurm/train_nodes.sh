#!/usr/bin/env bash
#SBATCH --job-name=webrl
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=webrl-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
# Trains on any number of nodes of 8 GPUs, from the root of the repository; by default Qwen3-VL-8B on four of them:
#   sbatch launch/slurm/train_nodes.sh run.name=mine trainer.updates=100
#   CONFIG=configs/32b_32node.yaml sbatch --nodes=34 launch/slurm/train_nodes.sh
# cluster.nodes of the configuration is the number of nodes that the job uses; `sbatch --nodes` asks for as many, and for
# one or two more as spares, so that a bad node does not end the job.
cd "${SLURM_SUBMIT_DIR:-.}"
source launch/slurm/common.sh
run_job "${CONFIG:-configs/8b_4node.yaml}" "$@"
