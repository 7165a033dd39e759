"""The control service as a process, with real clients."""

from __future__ import annotations

import http.client
import os
import random
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_webrl.control.client import Claimer, ControlClient, TicketClaim
from megatron_webrl.control.connection import Connection, ControlAddress, ControlLost, JobEnded, JobFailed
from megatron_webrl.control.state import TICKETS
from tests.control.service_process import ServiceProcess, service_process
from tests.job_control import claim_tickets, connect, control_service, start, tickets
from tests.waiting import until


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with service_process(tmp_path) as running:
        yield running


def test_each_ticket_is_claimed_once_although_the_service_is_killed_again_and_again(service: ServiceProcess) -> None:
    trainer = service.connect("trainer-0")
    trainer.start_ticket_epoch(0, 0, tickets(range(10, 310)))
    taken: list[list[TicketClaim]] = [[], [], []]

    def work(number: int) -> None:
        control = service.connect(f"rollout-{number}")
        while claims := claim_tickets(control, 2):
            taken[number] += claims
            for claim in claims[:1]:
                control.close_ticket(claim.ticket)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    chance = random.Random(3)
    for _ in range(5):
        time.sleep(chance.random() * 0.2)
        service.kill()
        service.start()
    for thread in threads:
        thread.join(120)
    assert sorted(claim.ticket for part in taken for claim in part) == list(range(10, 310))
    assert all(claim.task.seed == claim.ticket for part in taken for claim in part)
    unfinished = [c for n in range(3) for c in service.connect(f"rollout-{n}").unfinished_claims()]
    queue = trainer.run("read_queue", TICKETS)
    assert (queue["claimed"], len(queue["open"]), len(unfinished)) == (300, 150, 150)


def test_a_restarted_worker_finds_its_claims_and_its_earlier_instance_has_ended(service: ServiceProcess) -> None:
    service.connect("trainer-0").start_ticket_epoch(0, 0, tickets(range(5, 12)))
    first, other = service.connect("rollout-0"), service.connect("rollout-1")
    assert [claim.ticket for _ in range(3) for claim in claim_tickets(first, 1)] == [5, 6, 7]
    assert [claim.ticket for claim in claim_tickets(other, 1)] == [8]
    first.close_ticket(6)
    assert first.register_instance() == 1
    assert not other.instance_has_ended("rollout-0.1")
    again = service.connect("rollout-0")
    assert again.register_instance() == 2
    assert other.instance_has_ended("rollout-0.1")
    assert not other.instance_has_ended("rollout-0.2")
    assert [claim.ticket for claim in again.unfinished_claims()] == [5, 7]
    again.give_up_worker("rollout-1", "it failed too often")
    assert [claim.ticket for claim in claim_tickets(again, 1)] == [8]
    assert other.given_up_workers() == {"rollout-1": "it failed too often"}
    with pytest.raises(JobEnded):
        service.connect("rollout-1.follower-1").check_job()


def test_a_claim_waits_for_a_ticket_and_a_claimer_waits_in_the_background(service: ServiceProcess) -> None:
    trainer, worker = service.connect("trainer-0"), service.connect("rollout-0")
    trainer.start_ticket_epoch(0, 0, {})
    worker.start_heartbeat()
    claimer = Claimer(worker, "tickets", "rollout-0", sharers=2)
    assert claimer.poll(4) == []
    trainer.put_json("key", "of four tickets")
    trainer.issue_tickets(tickets(range(4)))
    found: list[list[object]] = []
    until(lambda: found or found.extend(claimer.poll(4)), "a claim")  # type: ignore[func-returns-value]
    assert [item for item, *_ in found] == [0, 1]  # a share of half
    assert worker.get_json("key") == "of four tickets"
    third = worker.claim("tickets", "rollout-1", 1, 1, wait_seconds=5.0)[0][0]
    assert third in (2, 3)
    open_tickets = lambda: len(trainer.run("read_queue", "tickets")["open"])  # noqa: E731
    until(lambda: open_tickets() == 4, "the claimer's next claim")
    until(lambda: claimer.put_back() or open_tickets() == 3, "its return")  # type: ignore[func-returns-value]
    assert worker.claim("tickets", "rollout-1", 1)[0][0] == 5 - third
    worker.close()


def test_a_claimer_claims_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    with control_service(tmp_path) as address:
        trainer = connect(address, "trainer-0")
        claimer = Claimer(connect(address, "rollout-0"), TICKETS, "rollout-0")
        count_open = lambda: len(trainer.run("read_queue", TICKETS)["open"])  # noqa: E731
        trainer.start_ticket_epoch(0, 0, tickets([0]))
        assert claimer.poll(3) == []
        until(lambda: count_open() == 1, "a claim")
        trainer.issue_tickets(tickets(range(1, 9)))
        until(lambda: claimer.poll(3), "the ticket")
        until(lambda: count_open() > 1, "another claim")
        assert count_open() == 3


def test_a_silent_role_is_lost_unless_it_is_restarted(tmp_path: Path) -> None:
    with service_process(tmp_path, heartbeat_timeout_seconds=1.5) as service:
        watcher, rank = service.connect("rollout-0"), service.connect("trainer-0")
        watcher.start_heartbeat()
        assert not watcher.is_lost("trainer-0")  # it was never heard
        rank.start_heartbeat()
        rank.report_status("update 3")
        until(lambda: watcher.status_of("trainer-0") == "update 3", "its status")
        assert watcher.role_reports()["trainer-0"]["progress"].startswith(f"{os.getpid()}:")
        assert not watcher.is_lost("trainer-0")
        rank.close()
        for control in (watcher, service.connect("launcher")):
            until(lambda: control.is_lost("trainer-0"), "its loss")  # noqa: B023
        with pytest.raises(JobFailed, match="trainer-0 is lost: no heartbeat for 2 s"):
            watcher.check_job(("trainer-0",))
        watcher.check_job(("trainer-0",), grace_seconds=60.0)
        watcher.clear_heartbeat("trainer-0")
        until(lambda: not watcher.is_lost("trainer-0"), "its restart")
        until(lambda: watcher.is_lost("trainer-0", grace_seconds=0.3), "a restart that takes too long")
        again = service.connect("trainer-0")
        again.start_heartbeat()
        until(lambda: not watcher.is_lost("trainer-0", grace_seconds=0.3), "its heartbeat")
        again.close()
        watcher.close()


def test_the_grace_of_a_restart_begins_with_each_silence(tmp_path: Path) -> None:
    with control_service(tmp_path) as address:
        control = connect(address, "rollout-0")
        control.put_json("silent/trainer-0", False)  # as the service does
        until(lambda: control.is_lost("trainer-0", grace_seconds=0.2), "its loss")
        control.put_json("silent/trainer-0", None)
        assert not control.is_lost("trainer-0", grace_seconds=0.2)
        control.put_json("silent/trainer-0", False)
        assert not control.is_lost("trainer-0", grace_seconds=0.2)


def test_the_first_outcome_counts_and_a_users_stop_replaces_others(service: ServiceProcess) -> None:
    one, other = service.connect("a"), service.connect("b")
    other.start_heartbeat()
    other.check_job()
    one.request_stop("preempted")
    until(other.stop_requested, "the stop")
    service.kill()
    service.start()
    one.request_stop()
    until(lambda: other.requested_outcome() == "stopped", "the user's stop, after a restart of the service")
    one.request_stop("preempted")
    assert one.requested_outcome() == "stopped"
    one.end_job("failed: a: broken")
    other.end_job("finished")
    for control in (one, other):
        with pytest.raises(JobFailed, match="a: broken"):
            control.check_job()
    other.close()


def test_a_clean_end_is_no_failure_and_keep_alive_delays_the_exit(tmp_path: Path) -> None:
    with service_process(tmp_path, before="server.LINGER_SECONDS = 0.2") as service:
        trainer = service.connect("trainer-0")
        with trainer.keep_alive():
            trainer.end_job("finished")
            with pytest.raises(JobEnded):
                trainer.check_job()
            time.sleep(1.0)  # longer than it stays by itself
            assert not service.has_exited()
        until(service.has_exited, "the exit of the control service", 30.0)


def test_a_service_that_is_shut_down_ends_at_once_whatever_waits(tmp_path: Path) -> None:
    address, service = start(tmp_path)
    control, body = connect(address, "launcher"), {"session": "a", "keys": ["key"], "revision": 2**60}

    def wait() -> None:
        with suppress(ControlLost):
            Connection(address, "rollout-0", lost_seconds=0.1).sync(make_fields=lambda: body, wait_seconds=5.0)

    waiting = threading.Thread(target=wait)
    waiting.start()
    control.put_json("other", 1)
    control.end_job("finished")
    control.shutdown()
    service.join(3.0)
    assert not service.is_alive()
    waiting.join()


def test_a_wait_and_a_service_without_answer_are_errors_that_name_them(service: ServiceProcess, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"a cannot reach the control service within 1 s: .*missing\.json"):
        ControlClient(tmp_path / "missing.json", "a", connect_seconds=1.0)
    control = service.connect("a", lost_seconds=1.0)
    control.start_heartbeat()
    with pytest.raises(JobFailed, match="a waited 0 s for the manifest"):
        control.wait_for_key("never", 0.2, "the manifest")
    service.kill()
    with pytest.raises(JobFailed, match=r"a lost the control service at 127\.0\.0\.1:\d+: no answer within 1 s"):
        control.wait_for_key("never", 20, "nothing")


def post(service: ServiceProcess, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> int:
    """The status of a request, by default with the token."""
    address = ControlAddress.read(service.address)
    assert address is not None
    connection = http.client.HTTPConnection(address.host, address.port, timeout=10)
    given = {"Authorization": f"Bearer {address.token}"} if headers is None else headers
    connection.request("POST" if body else "GET", path, body, dict(given))
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_request_without_the_token_is_refused_and_the_token_is_for_the_user_alone(service: ServiceProcess) -> None:
    address = ControlAddress.read(service.address)
    assert address is not None
    assert stat.S_IMODE(service.address.stat().st_mode) == 0o600
    assert stat.S_IMODE((service.folder / "journal").stat().st_mode) == 0o600
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {address.token[:-1]}"}):
        for path, body in (("/status", b""), ("/sync", b"{}"), ("/unknown", b"")):
            assert post(service, path, body, headers) == 401
    assert service.process is not None
    assert address.token not in service.log + Path(f"/proc/{service.process.pid}/cmdline").read_text()
    assert address.token not in (service.folder / "journal").read_text()


def test_the_tickets_of_a_large_batch_are_one_request(tmp_path: Path) -> None:
    with control_service(tmp_path) as address:
        control = ControlClient(address, "trainer-0", lost_seconds=1.0)
        control.start_ticket_epoch(0, 0, tickets(range(5000)))
        assert control.run("read_queue", TICKETS)["appended"] == 5000


def test_a_request_that_is_none_is_refused(service: ServiceProcess) -> None:
    for body in (
        b"[]", b"null", b"\xff", b'{"stream": "a"',
        b'{"stream": 1, "number": "x", "commands": [["get", []]]}',
        b'{"stream": "a", "number": 1, "commands": [[]]}',
        b'{"stream": "a", "number": 1, "commands": [["claim"]], "wait": 1}',
        b'{"session": "a", "keys": 3}',
    ):  # fmt: skip
        assert post(service, "/sync", body) == 400, body


def test_a_journal_that_cannot_be_written_does_not_end_the_job(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    with service_process(tmp_path, before=limit) as service:
        control = service.connect("a")
        for number in range(100):
            control.put_json(f"key/{number}", "x" * 100)
        assert control.get_json("key/99") == "x" * 100
        assert "File too large" in control._connection.status()["journal_error"]
        assert "ends if the control service does" in service.log
        assert not (tmp_path / "journal").exists()
