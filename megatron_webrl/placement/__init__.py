"""Placement of processes on nodes, GPUs and cores; memory estimate."""
