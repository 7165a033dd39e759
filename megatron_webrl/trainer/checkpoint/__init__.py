"""Checkpoints of the trainer and recovery from them."""
