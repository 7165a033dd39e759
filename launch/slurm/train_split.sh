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
#SBATCH hetjob
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --mem=0
# A heterogeneous job: trainer and engines on its first component, browsers on its second, which needs no GPUs:
#   sbatch --partition=gpu : --partition=cpu launch/slurm/train_split.sh run.name=mine
cd "${SLURM_SUBMIT_DIR:-.}"
source launch/slurm/common.sh
start_browser_servers "${CONFIG:-configs/8b_4node.yaml}" "$@"
run_job "${CONFIG:-configs/8b_4node.yaml}" "$@"
