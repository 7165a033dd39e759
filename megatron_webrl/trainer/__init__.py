"""Training role: batches from the ring, advantages, loss, optimiser, checkpoints."""
