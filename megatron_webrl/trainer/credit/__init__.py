"""Credit assignment: rewards of episodes, and the advantage of each step."""
