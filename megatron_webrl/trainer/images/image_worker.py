"""A worker process of `patch_pool`: reads which images to cut, writes their patches into shared memory.

python -m megatron_webrl.trainer.images.image_worker ARENA JOBS DONE SIZE PATCH MERGE, numbers: three descriptors, the bytes
of the arena, and the model's `Cut`. It ends when nobody is left to write jobs.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys

import numpy as np

from megatron_webrl.model.patchifier import Patchifier

JOB_STRUCT = struct.Struct("<6Q")
"""Number, offset and length of the encoded image, offset of its patches, rows and columns of its grid."""
RESULT_STRUCT = struct.Struct("<2Q")
"""Number, and the length of what went wrong, as text in place of the patches; 0 if nothing did."""


def main() -> None:
    arena, jobs, done, size, patch, merge = map(int, sys.argv[1:])
    memory, cut = mmap.mmap(arena, size), Patchifier(patch, merge)
    while message := _next(jobs):
        number, source, length, target, rows, columns = JOB_STRUCT.unpack(message)
        grid = (1, rows, columns)
        out = np.frombuffer(memory, np.uint8, cut.image_bytes(grid), target)
        words = b""
        try:
            cut.patchify(memory[source : source + length], grid, out)
        except Exception as error:  # whatever a damaged image does to its decoder, the trainer has to hear of it
            words = (str(error) or type(error).__name__).encode()[: len(out)]
            out[: len(words)] = np.frombuffer(words, np.uint8)
        os.write(done, RESULT_STRUCT.pack(number, len(words)))


def _next(jobs: int) -> bytes:
    """One job; nothing at the end. They are written whole, and so are read whole."""
    return os.read(jobs, JOB_STRUCT.size)


if __name__ == "__main__":
    main()
