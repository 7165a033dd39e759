"""Let a process fail at a chosen one of its file operations below a folder.

`FileFaults` replaces functions of `os` and `io.open` in this process. At operation number `at` the process is killed,
or an operation fails with an error. With `power_loss` the folder first gets a state in which a power failure
could leave it: bytes written after the last fsync of a file are cut off, and new names, renames and deletions after the
last fsync of their folder are undone, all or the last ones of them. A `torn` write leaves half of its bytes.
"""

from __future__ import annotations

import io
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from tests.waiting import exit_code, fork

NAMES = (
    "open", "write", "fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link", "ftruncate", "utime",
)  # fmt: skip
FUNCTIONS = {**{name: (os, name) for name in NAMES}, "io.open": (io, "open")}
Undo = tuple[str, Callable[[], object]]  # folder whose fsync makes an operation durable, how to undo it


class FileFaults:
    """Use as a context manager, in a forked process if it is to be killed. `count` is the number of operations."""

    def __init__(
        self,
        folder: Path,
        at: int = 0,
        error: int = 0,
        *,
        until: int = 0,
        torn: bool = False,
        power_loss: bool = False,
        seed: int = 0,
    ) -> None:
        """`at`: number of the operation at which to fail, counted from 1; 0: none.

        `error`: errno of the operations `at` to `until`, inclusive (0: only `at`); 0: kill the process before `at`.
        """
        self._root, self._at, self._until, self._error = str(folder.resolve()), at, until or at, error
        self._torn, self._power_loss, self._random = torn, power_loss, random.Random(seed)
        self.count = 0
        self.names: list[str] = []
        self._real: dict[str, Callable[..., Any]] = {}
        self._undo: list[Undo] = []
        self._written: dict[int, tuple[int, int]] = {}  # by inode: a descriptor, and the size that is on disk
        self._backups = Path(f"{self._root}.backups")

    def __enter__(self) -> FileFaults:
        if self._power_loss:
            self._backups.mkdir(exist_ok=True)
        for name, (module, attribute) in FUNCTIONS.items():
            self._real[name] = getattr(module, attribute)
            setattr(module, attribute, self._wrapped(name))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, (module, attribute) in FUNCTIONS.items():
            setattr(module, attribute, self._real[name])
        for own, _ in self._written.values():
            os.close(own)
        shutil.rmtree(self._backups, ignore_errors=True)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def operation(*arguments: Any, **options: Any) -> Any:
            path = self._changed_path(name, arguments, options)
            if path is None:
                return real(*arguments, **options)
            self._reach(name, arguments)
            undo = self._prepare(name, path, arguments) if self._power_loss else None
            result = real(*arguments, **options)
            if self._power_loss:
                self._note(name, path, undo, result, arguments)
            return result

        return operation

    def _changed_path(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        """The absolute path of the file that an operation changes, if it is below the folder."""
        first = arguments[0]
        if name == "io.open":
            changes = not isinstance(first, int) and [*arguments, options.get("mode", "r")][1][0] in "wxa"
        else:
            changes = name != "open" or bool(arguments[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
        if not changes:
            return None
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
        if options.get("dir_fd") is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{options['dir_fd']}"), path)
        return os.path.abspath(path) if self._is_below(path) else None

    def _is_below(self, path: str) -> bool:
        return os.path.abspath(path).startswith(self._root + "/") or os.path.abspath(path) == self._root

    def _reach(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Count an operation; fail if it is the chosen one."""
        self.count += 1
        self.names.append(name)
        if not self._at or not self._at <= self.count <= self._until:
            return
        if self._error:
            raise OSError(self._error, os.strerror(self._error))
        if self._torn and name == "write":
            self._real["write"](arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
        self.crash()

    def crash(self) -> NoReturn:
        """End this process at once, as a kill or a power failure would."""
        if self._power_loss:
            self._lose()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    def _prepare(self, name: str, path: str, arguments: tuple[Any, ...]) -> Undo | None:
        """Folder and inverse of an operation that changes names."""
        real, parent = self._real, os.path.dirname(path)
        if name in ("open", "io.open"):
            return None if os.path.exists(path) else (parent, lambda: real["unlink"](path))
        if name == "mkdir":
            return parent, lambda: shutil.rmtree(path)
        if name == "rmdir":
            return parent, lambda: real["mkdir"](path)
        if name in ("unlink", "remove"):
            backup = self._backup(path)
            return parent, lambda: real["link"](backup, path)
        if name == "link":
            target = os.path.abspath(os.fspath(arguments[1]))
            return os.path.dirname(target), lambda: real["unlink"](target)
        if name in ("rename", "replace"):
            target = os.path.abspath(os.fspath(arguments[1]))
            kept = self._backup(target) if os.path.isfile(target) else None

            def back() -> None:
                real["rename"](target, path)
                if kept is not None:
                    real["link"](kept, target)

            return os.path.dirname(target), back
        return None

    def _note(
        self,
        name: str,
        path: str,
        undo: tuple[str, Callable[[], object]] | None,
        result: Any,
        arguments: tuple[Any, ...],
    ) -> None:
        """Remember what an operation made durable, or what a power failure would lose of it."""
        if undo is not None:
            self._undo.append(undo)
        if name in ("open", "io.open") and not os.path.isdir(path):
            status = os.fstat(result if name == "open" else result.fileno())
            if status.st_ino not in self._written:
                self._written[status.st_ino] = (self._real["open"](path, os.O_RDWR), status.st_size)
        if name == "fsync" and os.path.isdir(path):
            self._undo = [entry for entry in self._undo if entry[0] != path]
        elif name in ("fsync", "ftruncate"):
            status = os.fstat(arguments[0])
            if status.st_ino in self._written:
                own, size = self._written[status.st_ino]
                self._written[status.st_ino] = (own, status.st_size if name == "fsync" else min(size, status.st_size))

    def _backup(self, path: str) -> str:
        target = str(self._backups / str(len(list(self._backups.iterdir()))))
        self._real["link"](path, target)
        return target

    def _lose(self) -> None:
        """Undo what is not on disk."""
        for descriptor, size in self._written.values():
            if (present := os.fstat(descriptor).st_size) > size:
                self._real["ftruncate"](descriptor, self._random.choice((size, self._random.randint(size, present))))
        lost = self._random.choice((len(self._undo), self._random.randint(0, len(self._undo))))
        for _, undo in reversed(self._undo[len(self._undo) - lost :]):
            with suppress(FileNotFoundError, FileExistsError, NotADirectoryError):
                undo()


def run_forked(function: Callable[[], object]) -> int:
    """Run a function in a forked process; returns its exit code, 0 if it returned, negative if it was killed."""
    return exit_code(fork(function), 300)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes; writes that would fail with EFBIG, as on a full disk with ENOSPC."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
