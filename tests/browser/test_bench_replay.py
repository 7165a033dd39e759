"""The benchmark of recording and replay: a short run, in a network namespace without a route."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.replay import measure, show

PROBE = """
from megatron_webrl.util.network import leave_network
from tools.bench.browsers.no_network import has_route, interfaces
leave_network()
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname()).close()
print(has_route(), interfaces())
"""


def test_recorded_episodes_are_replayed_identically_without_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = measure(tmp_path, episodes=4, repeats=2, sessions=2)
    if os.geteuid() == 0:
        assert figures["not_isolated"] == ""
    for replay in figures["replays"]:
        assert replay["identical_share"] >= 0.95
        assert (replay["failed"], replay["equal_rewards"]) == ([], 4)
        assert (replay["requests_not_recorded"], replay["connections"]) == (0, 0)
        assert replay["requests_replayed"] > 20
    show(figures)
    assert "4 episodes" in capsys.readouterr().out


def test_the_namespace_of_the_replays_has_a_loopback_interface_and_no_route() -> None:
    found = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if "no network namespace" in found.stderr:
        pytest.skip(found.stderr.splitlines()[-1])
    assert found.stdout == "False ['lo']\n", found.stderr
