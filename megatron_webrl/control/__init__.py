"""The control plane of a job."""
