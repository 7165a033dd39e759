"""Training passes on fake CUDA tensors, on a machine without a GPU."""
