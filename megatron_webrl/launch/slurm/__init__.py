"""The processes of a Slurm job on each node: preparation, control service, supervision, requeue."""
