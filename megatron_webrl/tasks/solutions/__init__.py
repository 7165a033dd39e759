"""Scripted solvers of MiniWoB++ environments: JavaScript expressions over a page, read by `tasks/scripted_policies.py`."""
