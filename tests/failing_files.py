"""Let file operations of a whole job fail or wait for a while, by a C library that every process of the job loads.

A disk that becomes read-only, breaks or stalls with files open for writing, and is well again later, can be had of no
local file system: ext4 stays read-only after an error. Needs a C compiler.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
STALL = -1  # operations wait, reads among them, as on NFS without its server


class FailingFiles:
    """Operations below `root`, in processes with `environment`, can fail. `folder`: for the library and its state."""

    def __init__(self, root: Path, folder: Path) -> None:
        """Compile the library. Raises CalledProcessError or FileNotFoundError without a compiler."""
        library, self._state = folder / "failing_files.so", folder / "failing_files.state"
        command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        self._set(0)
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAILING_FILES_STATE": str(self._state),
            "FAILING_FILES_ROOT": str(root.absolute()),
        }

    @contextmanager
    def failing(self, error: int) -> Iterator[None]:
        """Let operations fail with an errno: with EIO all, with others those that change files; or wait: STALL."""
        self._set(error)
        try:
            yield
        finally:
            self._set(0)

    def _set(self, state: int) -> None:
        descriptor = os.open(self._state, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(descriptor, struct.pack("i", state), 0)
        os.close(descriptor)
