"""What can be proven of the GPU path on a machine without a GPU: `python -m tools.gpu_proof`."""
