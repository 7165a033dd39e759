"""A limit to the memory of every process in which pages run."""

from __future__ import annotations

import psutil


def bound_pages(browser: int, mib: int) -> int:
    """Let each process that Chromium starts for pages take `mib` MiB at most; returns how many zygotes were told.

    `browser`: id of Chromium's browser process. Renderers are forked from zygotes, whose limits they inherit. Counted
    is writable memory of the process's own (RLIMIT_DATA): address space that is merely set aside, of which V8 takes a
    terabyte, and memory that is shared with other processes do not count.
    """
    told = 0
    for child in psutil.Process(browser).children(recursive=True):
        try:
            if "--type=zygote" in child.cmdline():
                child.rlimit(psutil.RLIMIT_DATA, (mib << 20, mib << 20))
                told += 1
        except psutil.NoSuchProcess:
            continue  # a helper that has done its work
    return told
