"""Errors of an engine."""


class EngineDeadError(RuntimeError):
    """The engine cannot generate any more; its worker must end."""
