"""What can go wrong in the ring. Every message names the segment, the value, the limit and the way out."""


class RingError(RuntimeError):
    """The ring cannot do what was asked."""


class RingFull(RingError):
    """No room came free within the time limit: the readers acknowledge too slowly or not at all."""


class RecordTooLarge(RingError):
    """The record would not fit even into an empty ring."""


class RecordCorrupt(RingError):
    """The bytes of a committed record are not those that its writer checksummed."""


class RecordError(ValueError):
    """Bytes that are not a whole record of the known format, or a trajectory that cannot become one."""
