"""Tasks, truth and labelled episodes of the offline websites."""
