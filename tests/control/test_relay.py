"""Relays as processes between real clients and a real control service."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import Connection
from megatron_webrl.control.facts import FactFollower
from megatron_webrl.control.liveness import Liveness
from megatron_webrl.control.relay import Relay
from tests.control.relay_process import RelayProcess, relay_process, role_process
from tests.control.service_process import ServiceProcess, service_process
from tests.job_control import claim_tickets, tickets
from tests.waiting import until

TIMEOUT_SECONDS = 6.0  # of heartbeats: longer than a client waits for a relay


def connect(service: ServiceProcess, role: str, relay: RelayProcess) -> ControlClient:
    """A role with a heartbeat, behind the relay."""
    control = ControlClient(service.address, role, relay_port=relay.port)
    control.start_heartbeat()
    return control


def uses_relay(control: ControlClient) -> Callable[[], bool]:
    """A condition: the relay has answered since this call."""
    before = control._facts.relay_answers
    return lambda: control._facts.relay_answers > before


def has_relay(control: ControlClient) -> Callable[[], bool]:
    """A condition: the relay, which waits for the service before it serves, has answered."""
    return lambda: control._facts.relay_answers > 0


def test_changes_reach_the_roles_of_a_node_through_its_relay_over_restarts_of_the_service(tmp_path: Path) -> None:
    with service_process(tmp_path, TIMEOUT_SECONDS) as service, relay_process(service.address) as relay:
        trainer, roles = service.connect("trainer-0"), [connect(service, f"rollout-{n}", relay) for n in range(3)]
        for role in roles:
            assert role.get_json("weights/offer") is None
            until(has_relay(role), "the relay")
        for version in range(10):
            if version == 5:
                service.kill()
                service.start()
            relayed = [uses_relay(role) for role in roles]
            trainer.put_json("weights/offer", {"version": version})
            for role in roles:
                until(lambda: role.get_json("weights/offer") == {"version": version}, f"offer {version}")  # noqa: B023
            assert all(each() for each in relayed)
            assert roles[version % 3].get_json(f"first/read/{version}") is None
        reports = trainer.role_reports()
        assert {role.role for role in roles} <= reports.keys()
        trainer.end_job("finished")
        until(lambda: all(role.job_end() for role in roles), "the end of the job")
        for role in roles:
            role.close()


def test_a_change_of_a_fact_that_was_just_read_arrives_at_once(tmp_path: Path) -> None:
    with service_process(tmp_path, TIMEOUT_SECONDS) as service, relay_process(service.address) as relay:
        trainer, role = service.connect("trainer-0"), connect(service, "rollout-0", relay)
        until(has_relay(role), "the relay")
        delays = []
        for number in range(5):
            assert role.get_json(f"key/{number}") is None
            started = time.monotonic()
            trainer.put_json(f"key/{number}", 1)
            until(lambda: role.get_json(f"key/{number}") == 1, "the change")  # noqa: B023
            delays.append(time.monotonic() - started)
        assert sorted(delays)[2] < 0.5, delays  # less than the pause between two exchanges
        role.close()


def test_a_role_that_its_relay_does_not_hear_is_lost_and_its_neighbours_are_not(tmp_path: Path) -> None:
    with service_process(tmp_path, TIMEOUT_SECONDS) as service, relay_process(service.address) as relay:
        watcher, neighbour = service.connect("trainer-0"), connect(service, "rollout-1", relay)
        watcher.start_heartbeat()
        with role_process(service.address, "rollout-0", relay.port) as process:
            until(lambda: "rollout-0" in watcher.role_reports(), "its heartbeat")
            until(has_relay(neighbour), "the relay")
            beats = watcher.role_reports()["rollout-0"]["beats"]
            until(lambda: watcher.role_reports()["rollout-0"]["beats"] > beats + 2, "heartbeats")
            process.kill()
            process.wait()
            killed = time.monotonic()
            until(lambda: watcher.is_lost("rollout-0"), "its loss")
        assert TIMEOUT_SECONDS - 1.5 < time.monotonic() - killed < TIMEOUT_SECONDS + 4.0
        assert not watcher.is_lost("rollout-1")
        watcher.clear_heartbeat("rollout-0")
        until(lambda: not watcher.is_lost("rollout-0"), "its restart")
        with role_process(service.address, "rollout-0", relay.port):
            until(lambda: not watcher.role_reports()["rollout-0"]["cleared"], "its heartbeat")
        for control in (watcher, neighbour):
            control.close()


def test_a_dead_role_is_not_reported_after_an_outage_of_the_service(tmp_path: Path) -> None:
    with service_process(tmp_path, TIMEOUT_SECONDS) as service, relay_process(service.address) as relay:
        neighbour = connect(service, "rollout-1", relay)
        with role_process(service.address, "rollout-0", relay.port) as process:
            until(lambda: service.connect("test").role_reports().keys() >= {"rollout-0", "rollout-1"}, "heartbeats")
            until(has_relay(neighbour), "the relay")
            service.kill()
            process.kill()
            process.wait()
        time.sleep(3.0)  # an outage of several heartbeats
        service.start()
        watcher = service.connect("test")
        until(lambda: "rollout-1" in watcher.role_reports(), "the living role")
        silent = watcher.role_reports().get("rollout-0", {"silent_seconds": 9.0})["silent_seconds"]
        assert silent > 2.0
        neighbour.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_roles_exchange_with_the_service_while_their_relay_does_not_answer(
    tmp_path: Path, number: signal.Signals
) -> None:
    with service_process(tmp_path, TIMEOUT_SECONDS) as service, relay_process(service.address) as relay:
        watcher, role = service.connect("trainer-0"), connect(service, "rollout-0", relay)
        watcher.start_heartbeat()
        assert role.get_json("weights/offer") is None
        until(has_relay(role), "the relay")
        relay.process.send_signal(number)
        watcher.put_json("weights/offer", 1)
        until(lambda: role.get_json("weights/offer") == 1, "the offer")
        assert role.get_json("first/read") is None
        until(lambda: watcher.role_reports()["rollout-0"]["silent_seconds"] < 1.0, "its heartbeat")
        assert not watcher.is_lost("rollout-0")
        if number is signal.SIGSTOP:
            again = uses_relay(role)
            relay.process.send_signal(signal.SIGCONT)
            until(lambda: watcher.put_json("weights/offer", time.time()) or again(), "news from the relay")  # type: ignore[func-returns-value]
        for control in (watcher, role):
            control.close()


def test_a_role_that_has_claimed_knows_all_facts_from_before_the_claim(tmp_path: Path) -> None:
    """The relay is stopped for a part of the claims, and the service is killed once."""
    with service_process(tmp_path, 60.0) as service, relay_process(service.address) as relay:
        trainer, worker = service.connect("trainer-0"), connect(service, "rollout-0", relay)
        trainer.start_ticket_epoch(0, 0, {})
        assert worker.get_json("index") is None
        until(has_relay(worker), "the relay")
        for ticket in range(40):
            if ticket == 10:
                service.kill()
                service.start()
            if ticket in (20, 30):
                relay.process.send_signal(signal.SIGSTOP if ticket == 20 else signal.SIGCONT)
            trainer.put_json("index", ticket)
            trainer.issue_tickets(tickets([ticket]))
            [claim] = claim_tickets(worker, 1, wait_seconds=5.0)
            assert (claim.ticket, worker.get_json("index")) == (ticket, ticket)
        worker.close()


def test_a_relay_refuses_a_request_without_the_token(tmp_path: Path) -> None:
    with service_process(tmp_path) as service, relay_process(service.address) as relay:
        for headers in ({}, {"Authorization": "Bearer none"}):
            connection = http.client.HTTPConnection("127.0.0.1", relay.port, timeout=30)
            connection.request("POST", "/sync", b"{}", headers)
            assert connection.getresponse().status == 401
            connection.close()


def test_older_news_change_nothing_whichever_server_they_come_from(tmp_path: Path) -> None:
    changes: list[object] = []
    follower = FactFollower(
        Connection(tmp_path / "none", "rollout-0"),
        on_answer=lambda new, revision: changes.extend(value for _, value, _ in new),
    )

    def answer(revision: int, changed: int, value: int, **fields: object) -> dict[str, object]:
        return {"revision": revision, "interval": 1.0, "facts": {"offer": [changed, value], **fields}}

    request = follower.request(["offer"])
    assert (request["keys"], request["new"], request["revision"]) == (["offer"], ["offer"], 0)
    follower.merge(request, answer(7, 7, 2))
    follower.merge(follower.request(), answer(5, 5, 1))  # of a relay
    assert (follower.facts, changes, follower.request()["revision"]) == ({"offer": (7, 2)}, [2], 7)
    early = follower.request()
    follower.merge(follower.request(["stop"]), answer(9, 9, 3, stop=[8, None]))
    follower.merge(early, answer(12, 9, 3))  # says nothing of changes of the other fact
    assert (follower.facts["offer"], follower.request()["revision"], changes) == ((9, 3), 9, [2, 3, None])


def test_a_late_report_of_an_ended_process_does_not_undo_the_clearing_of_its_role() -> None:
    liveness = Liveness(10.0)
    liveness.report("rollout-0", 1.0, {"sender": "first", "progress": "1:1"})
    liveness.clear("rollout-0")
    liveness.report("rollout-0", 1.5, {"sender": "first", "progress": "1:2"})
    assert liveness.to_json(2.0)["rollout-0"]["cleared"]
    assert liveness.silent_roles(12.0) == {"rollout-0": True}
    liveness.report("rollout-0", 12.0, {"sender": "second"})
    assert liveness.silent_roles(13.0) == {}


async def test_a_relay_answers_a_role_that_lacks_nothing_after_its_wait_only(tmp_path: Path) -> None:
    with service_process(tmp_path) as service:
        relay, answers = Relay(service.address, "node-0"), 0
        threading.Thread(target=relay.follow, daemon=True).start()
        body = {"session": "rollout-0", "keys": ["end", "offer"], "wait": 1.0, "roles": {"rollout-0": (0.0, {})}}
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            body["revision"] = json.loads(await relay.sync(body))["revision"]
            answers += 1
        relay.ended = True
        assert 2 <= answers <= 6
