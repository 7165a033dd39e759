"""Tests of `webrl gpu-check`."""
