"""Predicted seconds of an update and of generation, from a configuration and the data sheet of a card. No torch."""
