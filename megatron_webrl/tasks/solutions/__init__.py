"""Scripted policies of MiniWoB++ environments: JavaScript expressions for `tasks/scripted_policies.py`."""
