"""The `webrl` command as a process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

INTERRUPTED_AT_IMPORT = """
import runpy, signal, sys

class Interruption:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interruption())
runpy.run_module("megatron_webrl", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_during_the_first_imports_ends_a_command_in_one_line(ignored: bool) -> None:
    command = [sys.executable, "-c", INTERRUPTED_AT_IMPORT, "megatron_webrl.config.schema"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, b"webrl: interrupted\n")
