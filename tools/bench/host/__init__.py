"""What the host of a trainer rank does for an update."""
