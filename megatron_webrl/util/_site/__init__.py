"""A folder for the front of PYTHONPATH of subprocesses; see sitecustomize.py."""
