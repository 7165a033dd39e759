"""Relays as processes between real clients and a real control service."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_webrl.control import facts
from megatron_webrl.control import relay as relays
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import ControlAddress
from megatron_webrl.control.relay import Relay
from megatron_webrl.control.server import Unavailable
from tests.control.service_process import FREQUENT_HEARTBEATS, ServiceProcess, service_process
from tests.job_control import claim_tickets, tickets
from tests.waiting import started, until

TIMEOUT_SECONDS = 2.0  # of frequent heartbeats: longer than a client waits for a relay
RELAY = """
import signal, sys
from pathlib import Path
from megatron_webrl.control.relay import start_relay
exec(sys.argv[2])
print(start_relay(Path(sys.argv[1]), "node-0"), flush=True)
signal.pause()
"""
ROLE = """
import signal, sys
from pathlib import Path
from megatron_webrl.control.client import ControlClient
ControlClient(Path(sys.argv[1]), sys.argv[2], relay_port=int(sys.argv[3])).start_heartbeat()
print("started", flush=True)
signal.pause()
"""


@dataclass
class Node:
    """A relay in a process of its own, as in the supervisor of a node, and its control service."""

    service: ServiceProcess
    relay: subprocess.Popen[str]
    port: int

    def connect(self, role: str) -> ControlClient:
        """A role with a heartbeat, which the relay has answered."""
        control = ControlClient(self.service.address, role, relay_port=self.port)
        control.start_heartbeat()
        until(lambda: control._facts.relay_answers > 0, "the relay, which waits for the service before it serves")
        return control

    @contextmanager
    def role_process(self, role: str) -> Iterator[subprocess.Popen[str]]:
        """A role that sends heartbeats and does nothing else; killed at the end."""
        with started([sys.executable, "-c", ROLE, str(self.service.address), role, str(self.port)]) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            yield process


@contextmanager
def node(folder: Path, timeout_seconds: float = 60.0, before: str = "") -> Iterator[Node]:
    """`before`: statements at the start of both processes."""
    with (
        service_process(folder, timeout_seconds, before) as service,
        started([sys.executable, "-c", RELAY, str(service.address), before]) as relay,
    ):
        assert relay.stdout is not None
        yield Node(service, relay, int(relay.stdout.readline()))


def uses_relay(control: ControlClient) -> Callable[[], bool]:
    """A condition: the relay has answered since this call."""
    before = control._facts.relay_answers
    return lambda: control._facts.relay_answers > before


def test_changes_reach_the_roles_of_a_node_through_its_relay_over_restarts_of_the_service(tmp_path: Path) -> None:
    with node(tmp_path) as here:
        service = here.service
        trainer, roles = service.connect("trainer-0"), [here.connect(f"rollout-{n}") for n in range(3)]
        assert [role.get_json("weights/offer") for role in roles] == [None] * 3
        for version in range(6):
            if version == 3:
                service.kill()
                service.start()
            relayed = [uses_relay(role) for role in roles]
            trainer.put_json("weights/offer", {"version": version})
            for role in roles:
                until(lambda: role.get_json("weights/offer") == {"version": version}, f"offer {version}")  # noqa: B023
            assert all(each() for each in relayed)
        assert {role.role for role in roles} <= trainer.role_reports().keys()
        trainer.end_job("finished")
        until(lambda: all(role.job_end() for role in roles), "the end of the job")
        for role in roles:
            role.close()


def test_a_change_of_a_fact_that_was_just_read_arrives_at_once(tmp_path: Path) -> None:
    with node(tmp_path) as here:
        trainer, role, delays = here.service.connect("trainer-0"), here.connect("rollout-0"), []
        for number in range(5):
            assert role.get_json(f"key/{number}") is None
            begun = time.monotonic()
            trainer.put_json(f"key/{number}", 1)
            until(lambda: role.get_json(f"key/{number}") == 1, "the change")  # noqa: B023
            delays.append(time.monotonic() - begun)
        assert sorted(delays)[2] < 0.5, delays  # less than the pause between two requests
        role.close()


def test_a_role_that_its_relay_does_not_hear_is_lost_and_not_reported_after_an_outage(tmp_path: Path) -> None:
    with node(tmp_path, TIMEOUT_SECONDS, FREQUENT_HEARTBEATS) as here:
        watcher, neighbour = here.service.connect("trainer-0"), here.connect("rollout-1")
        watcher.start_heartbeat()
        with here.role_process("rollout-0") as process:
            until(lambda: "rollout-0" in watcher.role_reports(), "its heartbeat")
            beats = watcher.role_reports()["rollout-0"]["beats"]
            until(lambda: watcher.role_reports()["rollout-0"]["beats"] > beats + 2, "heartbeats")
            process.kill()
            process.wait()
            killed = time.monotonic()
            until(lambda: watcher.is_lost("rollout-0"), "its loss")
        assert TIMEOUT_SECONDS - 0.5 < time.monotonic() - killed < TIMEOUT_SECONDS + 4.0
        assert not watcher.is_lost("rollout-1")
        watcher.clear_heartbeat("rollout-0")
        until(lambda: not watcher.is_lost("rollout-0"), "its restart")
        with here.role_process("rollout-0") as process:
            until(lambda: not watcher.role_reports()["rollout-0"]["cleared"], "its heartbeat")
            here.service.kill()
            process.kill()
            process.wait()
        time.sleep(1.0)  # an outage of several heartbeats
        here.service.start()
        until(lambda: "rollout-1" in watcher.role_reports(), "the living role")
        assert watcher.role_reports().get("rollout-0", {"silent_seconds": 9.0})["silent_seconds"] > 0.6
        for control in (watcher, neighbour):
            control.close()


def test_roles_ask_the_service_while_their_relay_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "RELAY_SECONDS", 0.7)
    monkeypatch.setattr(facts, "RELAY_PAUSE_SECONDS", 1.0)
    with node(tmp_path, TIMEOUT_SECONDS, FREQUENT_HEARTBEATS) as here:
        watcher, role = here.service.connect("trainer-0"), here.connect("rollout-0")
        watcher.start_heartbeat()
        assert role.get_json("weights/offer") is None
        for headers in ({}, {"Authorization": "Bearer none"}):
            connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=30)
            connection.request("POST", "/sync", b"{}", headers)
            assert connection.getresponse().status == 401
            connection.close()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            here.relay.send_signal(number)
            watcher.put_json("weights/offer", number)
            until(lambda: role.get_json("weights/offer") == number, "the offer")  # noqa: B023
            assert role.get_json(f"first/read/{number}") is None
            until(lambda: watcher.role_reports()["rollout-0"]["silent_seconds"] < 1.0, "its heartbeat")
            assert not watcher.is_lost("rollout-0")
            if number is signal.SIGSTOP:
                again = uses_relay(role)
                here.relay.send_signal(signal.SIGCONT)
                until(lambda: watcher.put_json("weights/offer", time.time()) or again(), "news from the relay")  # type: ignore[func-returns-value]  # noqa: B023
        for control in (watcher, role):
            control.close()


async def test_a_relay_without_its_service_refuses_the_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They find out for themselves whether it is lost."""
    monkeypatch.setattr(relays, "LOST_SECONDS", 0.2)
    address = tmp_path / "control.json"
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    ControlAddress("127.0.0.1", port, 1, "job", "token").write(address)
    relay = Relay(address, "node-0")
    threading.Thread(target=relay.follow, daemon=True).start()
    refusals: list[str] = []

    async def beat() -> None:
        try:
            await relay.sync({"session": "a", "keys": [], "roles": {"rollout-0": (0.0, {})}})
        except Unavailable as error:
            refusals.append(str(error))

    async with asyncio.timeout(10):
        while not refusals:
            await beat()
            await asyncio.sleep(0.02)
    relay.ended = True
    assert f"127.0.0.1:{port}" in refusals[0]


def test_a_role_that_has_claimed_knows_all_facts_from_before_the_claim(tmp_path: Path) -> None:
    """The relay is stopped for a part of the claims, and the service is killed once."""
    with node(tmp_path) as here:
        trainer, worker = here.service.connect("trainer-0"), here.connect("rollout-0")
        trainer.start_ticket_epoch(0, 0, {})
        assert worker.get_json("index") is None
        for ticket in range(40):
            if ticket == 10:
                here.service.kill()
                here.service.start()
            if ticket in (20, 30):
                here.relay.send_signal(signal.SIGSTOP if ticket == 20 else signal.SIGCONT)
            trainer.put_json("index", ticket)
            trainer.issue_tickets(tickets([ticket]))
            [claim] = claim_tickets(worker, 1, wait_seconds=5.0)
            assert (claim.ticket, worker.get_json("index")) == (ticket, ticket)
        worker.close()


async def test_a_relay_answers_a_role_that_lacks_nothing_after_its_wait_only(tmp_path: Path) -> None:
    with service_process(tmp_path) as service:
        relay, answers = Relay(service.address, "node-0"), 0
        threading.Thread(target=relay.follow, daemon=True).start()
        body = {"session": "rollout-0", "keys": ["end", "offer"], "wait": 0.3, "roles": {"rollout-0": (0.0, {})}}
        deadline = time.monotonic() + 0.9
        while time.monotonic() < deadline:
            body["revision"] = json.loads(await relay.sync(body))["revision"]
            answers += 1
        relay.ended = True
        assert 2 <= answers <= 6
