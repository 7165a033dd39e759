"""The `webrl` command as a process: Ctrl-C ends it in one line, from its first import on."""

from __future__ import annotations

import gc
import signal
import sys

INTERRUPTED_EXIT_CODE = 130


def entry() -> None:
    """The console script."""
    # nohup, cron and the background of a script start commands with SIGINT ignored, and Python then raises nothing.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if sys.argv[1:2] == ["role"]:  # of a job: without the modules of all other commands
            from megatron_webrl.launch import role

            code = role.main(sys.argv[2:])
        else:
            from megatron_webrl.cli import main  # takes a moment

            code = main()
    except KeyboardInterrupt:  # of a command that has nothing to end
        sys.stderr.write("webrl: interrupted\n")
        code = INTERRUPTED_EXIT_CODE
    gc.freeze()  # the interpreter's last collection would take more than a second for the modules of torch
    sys.exit(code)


if __name__ == "__main__":
    entry()
