"""Time to a success of sampled episodes in asynchronous and synchronous modes."""
