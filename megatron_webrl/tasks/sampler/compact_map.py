"""Values by name in sorted arrays: pass rates of 100,000 tasks take 4 MiB, in a dictionary 20 MiB."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

Value = TypeVar("Value")


class CompactMap(Generic[Value]):
    """An immutable map."""

    def __init__(
        self,
        dtype: np.dtype[Any],
        read: Callable[[Any], Value],
        names: np.ndarray | None = None,
        values: np.ndarray | None = None,
    ) -> None:
        """dtype: of an element that holds a value, and `read` makes a value of its Python equivalent; names: bytes
        [names], UTF-8, ascending; values: [names].
        """
        self._dtype, self._read = dtype, read
        self.names = np.zeros(0, "S1") if names is None else names
        self.values = np.zeros(0, dtype) if values is None else values

    def __len__(self) -> int:
        return len(self.names)

    def get(self, name: str) -> Value | None:
        """The value of a name; None without one."""
        key = name.encode()
        if len(key) > self.names.itemsize:  # numpy would widen all names to compare them
            return None
        place = int(np.searchsorted(self.names, key))
        found = place < len(self.names) and self.names[place] == key
        return self._read(self.values[place].item()) if found else None

    def items(self) -> Iterator[tuple[str, Value]]:
        """Names and values, in the order of the names' bytes."""
        for name, value in zip(self.names, self.values, strict=True):
            yield name.decode(), self._read(value.item())

    def updated(self, changes: Mapping[str, Value | None]) -> CompactMap[Value]:
        """The map with other values for some names; None removes a name."""
        if not changes:
            return self
        keys = np.array([name.encode() for name in changes])
        kept = ~np.isin(self.names, keys)
        given = [(name.encode(), value) for name, value in changes.items() if value is not None]
        names = np.concatenate([self.names[kept], np.array([name for name, _ in given], "S")])
        values = np.concatenate([self.values[kept], np.array([value for _, value in given], self._dtype)])
        order = np.argsort(names, kind="stable")
        return CompactMap(self._dtype, self._read, names[order], values[order])
