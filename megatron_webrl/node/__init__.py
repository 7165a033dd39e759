"""The nodes of a Slurm job: what each starts of both steps, and whether it is fit to."""
