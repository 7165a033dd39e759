"""Reference of all metrics of an update and of an evaluation: name, unit, definition, place in the code."""
