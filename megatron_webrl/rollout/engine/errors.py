"""Errors of an engine."""


class EngineDeadError(RuntimeError):
    """The engine cannot answer any more; the worker that holds it must end."""
