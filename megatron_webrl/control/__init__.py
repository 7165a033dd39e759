"""The control service of a job."""
