"""The facts of the control service behind the methods of a torch.distributed.Store that a weight link uses.

A link's members find each other, announce their transfers and report failures there, so that a member that ends takes
none of these facts with it. Values are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_webrl.control.connection import Connection


class FactStore:
    """May be used by several threads. Methods raise ControlLost, a RuntimeError, if the service does not answer."""

    def __init__(self, address_file: Path, name: str, timeout_seconds: float) -> None:
        """Connect as `name`; `timeout_seconds` limits each operation. Raises ControlLost."""
        self._connection = Connection(address_file, name, timeout_seconds)
        self._connection.job()
        assert self._connection.address is not None
        self.host, self.port = self._connection.address.host, self._connection.address.port

    def set(self, key: str, value: str | bytes) -> None:
        self._run("put", key, _text(value))

    def get(self, key: str) -> bytes:
        """The value of a key. Raises KeyError without one."""
        return self.multi_get([key])[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return None not in self._run("get", list(keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys. Raises KeyError if one has none."""
        values = self._run("get", list(keys))
        for key, value in zip(keys, values, strict=True):
            if value is None:
                raise KeyError(key)
        return [value.encode("latin-1") for value in values]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that has no value, for which `expected` must be empty; returns its value."""
        assert not expected
        value: str = self._run("put_if_absent", key, _text(desired))
        return value.encode("latin-1")

    def delete_key(self, key: str) -> None:
        self._run("put", key, None)

    def _run(self, *command: Any) -> Any:
        return self._connection.run([command])["replies"][0]


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")  # a character for each byte
