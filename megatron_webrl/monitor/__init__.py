"""The web pages of a run: its stored episodes, what the model saw, how the run learns."""
