"""Task sampling: the probability of each environment, and how states of a sampler reach the workers."""
