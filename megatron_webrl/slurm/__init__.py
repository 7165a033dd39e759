"""What a node of a Slurm job starts and watches."""
