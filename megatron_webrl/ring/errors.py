"""Errors of the ring. Every message names the segment, the value, the limit and the way out."""


class RingError(RuntimeError):
    """The operation on the ring failed."""


class RingFull(RingError):
    """No space became free within the time limit: the readers acknowledge too slowly or not at all."""


class RecordTooLarge(RingError):
    """The record is larger than the ring."""


class RecordCorrupt(RingError):
    """The bytes of a committed record do not match their checksum."""


class RecordError(ValueError):
    """The bytes are not one complete record of the known format, or a trajectory cannot be encoded."""
