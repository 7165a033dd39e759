"""Main of an image worker process: cuts images into patches in shared memory.

python -m megatron_webrl.trainer.images.image_worker MEMORY JOBS RESULTS SIZE PATCH MERGE

MEMORY, JOBS, RESULTS: descriptors; SIZE: bytes; PATCH, MERGE: model sizes. Ends when no process is left to write jobs.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys

import numpy as np

from megatron_webrl.model.patchifier import Patchifier

JOB_STRUCT = struct.Struct("<6Q")  # job id, offset and length of the image, offset of its patches, grid rows, columns
RESULT_STRUCT = struct.Struct("<2Q")  # job id, length of an error message that replaces the patches; 0 for success


def main() -> None:
    memory_fd, jobs_fd, results_fd, size, patch_size, merge_size = map(int, sys.argv[1:])
    memory, patchifier = mmap.mmap(memory_fd, size), Patchifier(patch_size, merge_size)
    while message := _read_job(jobs_fd):
        job_id, image_offset, image_bytes, patches_offset, rows, columns = JOB_STRUCT.unpack(message)
        grid = (1, rows, columns)
        out = np.frombuffer(memory, np.uint8, patchifier.image_bytes(grid), patches_offset)
        reason = b""
        try:
            patchifier.patchify(memory[image_offset : image_offset + image_bytes], grid, out)
        except Exception as error:  # decoders raise many types on damaged images; the trainer reports them all
            reason = (str(error) or type(error).__name__).encode()[: len(out)]
            out[: len(reason)] = np.frombuffer(reason, np.uint8)
        os.write(results_fd, RESULT_STRUCT.pack(job_id, len(reason)))


def _read_job(jobs_fd: int) -> bytes:
    """One job, empty at the end. Jobs are written whole, so they are read whole."""
    return os.read(jobs_fd, JOB_STRUCT.size)


if __name__ == "__main__":
    main()
