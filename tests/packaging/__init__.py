"""Tests of installation, locked requirements and container images."""
