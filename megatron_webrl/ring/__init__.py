"""The shared-memory ring that carries trajectories from rollout to trainer on one node."""
