"""Joining a link: its store, ranks that die or stop while it is formed, and the options of its NCCL group."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megatron_webrl.control.connection import Connection
from megatron_webrl.control.group_store import host_group_store
from megatron_webrl.weights import link as links
from megatron_webrl.weights import transport
from megatron_webrl.weights.link import GlooChannel, NcclChannel
from megatron_webrl.weights.shared_memory import Pipe, SharedMemoryChannel
from tests import forks, job_control
from tests.waiting import until
from tests.weights.nccl_order import Network, install

SECONDS = 2.0
SLACK = 10.0  # seconds that a busy machine may exceed a timeout


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Path]:
    with job_control.control_service(tmp_path) as address:
        yield address


def client(control: Path) -> Connection:
    return Connection(control, "test", 30)


def join_in_threads(
    control: Path, ranks: list[int], size: int, seconds: float = SECONDS, backend: Any = "gloo", senders: int = 1
) -> dict[int, Any]:
    """Join ranks of link "x" at once; returns each one's link or error."""
    found: dict[int, Any] = {}

    def join(rank: int) -> None:
        try:
            found[rank] = transport.join_link(
                client(control), "x", rank, size, seconds, backend, links.CPU, tuple(range(senders))
            )
        except transport.TransferError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + links.GRACE_SECONDS + SLACK)
        assert not thread.is_alive(), "a rank still joins"
    return found


def victim(control: Path, rank: int, number: int) -> None:
    """Join as far as other ranks can see, and die or stop before connecting."""
    store, hosted = links.LinkFacts(client(control), "x"), None
    if rank == 0:
        service = client(control).connect()
        hosted, address = host_group_store(service.host, service.port, SECONDS)
        store.set("store", json.dumps(address))
    store.set(f"done/{rank}", "-1")
    store.set(f"member/{rank}", f"{socket.gethostname()}:{os.getpid()}")
    os.kill(os.getpid(), number)
    del hosted


@pytest.fixture
def victims() -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for process in started:
        process.kill()
        process.join(10)


def test_the_groups_keys_stay_out_of_the_facts_of_the_job_and_end_with_the_link(control: Path) -> None:
    found = join_in_threads(control, [0, 1], 2, 20.0)
    other = found[1].group_store
    assert found[0].group_store.list_keys(), "the group has exchanged its addresses over its own store"
    assert {key for key in job_control.facts(control) if key.startswith("link/")} == {
        "link/x/store",
        *(f"link/x/{key}/{r}" for key in ("member", "done") for r in (0, 1)),
    }
    found[0].group_store.set("exception_dump", "1")
    assert other.check(["exception_dump"])
    assert "exception_dump" not in job_control.facts(control)
    address = (other.host, other.port)
    socket.create_connection(address, 5).close()
    found[0].close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 5)
    found[1].close()


@pytest.mark.parametrize("how", ["one machine", "another host", "another container", "no memory"])
def test_a_link_has_shared_memory_where_all_ranks_see_each_other(
    control: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "another host":
        monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)
    elif how == "another container":
        monkeypatch.setattr(Pipe, "open", Mock(side_effect=OSError))
    elif how == "no memory":
        monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError))
    found = join_in_threads(control, [0, 1, 2], 3, 20.0, "host", senders=2)
    kinds = {type(link.channel) for link in found.values()}
    assert kinds == {SharedMemoryChannel if how == "one machine" else GlooChannel}, found
    for link in found.values():
        link.close()
    del found, link
    gc.collect()
    assert not [each for each in Path("/proc/self/fd").iterdir() if "webrl-weights" in str(each.resolve())]


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGSTOP), (2, signal.SIGKILL)])
def test_a_rank_that_ends_or_stops_while_the_link_is_formed_fails_it_in_time(
    control: Path, victims: list[Any], monkeypatch: pytest.MonkeyPatch, rank: int, number: signal.Signals
) -> None:
    monkeypatch.setattr(links, "GRACE_SECONDS", 1.0)
    victims.append(forks.context().Process(target=victim, args=(control, rank, number)))
    victims[0].start()
    store = links.LinkFacts(client(control), "x")
    until(lambda: store.check([f"member/{rank}"]), "the victim")
    started = time.monotonic()
    found = join_in_threads(control, [each for each in range(3) if each != rank], 3)
    assert time.monotonic() - started < SECONDS + 1.0 + SLACK
    for text in found.values():
        assert text.startswith("link x: rank ")
        assert f":{victims[0].pid}" in text


def test_the_first_failure_ends_the_join_of_all_ranks_at_once(control: Path, victims: list[Any]) -> None:
    victims.append(forks.context().Process(target=victim, args=(control, 2, signal.SIGSTOP)))
    victims[0].start()
    store = links.LinkFacts(client(control), "x")
    until(lambda: store.check(["member/2"]), "the victim")
    store.set("member/3", "there:7")
    threading.Timer(1.0, store.set, ("failed", "rank 3 (there:7): no GPU memory")).start()
    started = time.monotonic()
    found = join_in_threads(control, [0, 1], 4, 60.0)
    assert time.monotonic() - started < 1.0 + SLACK
    for text in found.values():
        assert text.endswith("another rank failed; first to fail was rank 3 (there:7): no GPU memory")


def test_the_operations_in_flight_end_at_both_ends_of_a_closed_link(control: Path) -> None:
    found, wakeups = join_in_threads(control, [0, 1], 2, 20.0), (threading.Event(), threading.Event())
    for rank, wakeup in enumerate(wakeups):
        found[rank].channel.start_transfer(wakeup, 60.0)
        found[rank].channel.receive(torch.empty(1), 1 - rank)  # which the other does not send
    found[1].close()
    for rank, wakeup in enumerate(wakeups):
        assert wakeup.wait(SLACK), f"rank {rank} still receives"
        assert found[rank].channel.completed()[1]
    found[0].close()


def test_a_link_that_a_rank_refuses_is_not_waited_for(control: Path) -> None:
    transport.reject_link(client(control), "x", "another plan")
    started = time.monotonic()
    assert "another plan" in join_in_threads(control, [0], 2, 60.0)[0]
    assert time.monotonic() - started < SLACK


def test_a_rank_that_cannot_host_the_store_says_so(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_webrl.control.group_store.own_address", lambda *_: "192.0.2.1")  # of no machine
    with pytest.raises(transport.TransferError, match=r"link x: rank 0 \(.*\) cannot host a store: .*assign"):
        transport.join_link(client(control), "x", 0, 2, SECONDS, "gloo")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """NCCL's order without NCCL."""
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "2")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    return Network()


def test_an_nccl_link_connects_each_sender_to_each_receiver_in_the_background(
    control: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the constructor of its group sees the variables that let no watchdog end the process."""
    made, before = install(monkeypatch, network), dict(os.environ)
    found = join_in_threads(control, [0, 1, 2, 3, 4], 5, 20.0, "nccl", senders=2)
    assert dict(os.environ) == before
    for options in made:
        assert options._timeout > timedelta(seconds=20)
        assert (options.config.blocking, options.config.max_ctas) == (0, links.MAX_CTAS)
        variables = [options.environment[f"TORCH_NCCL_{each}"] for each in ("BLOCKING_WAIT", "ASYNC_ERROR_HANDLING")]
        assert variables == ["1", "0"]
    data = {rank: torch.full((3,), float(rank)) for rank in found}
    pairs = [(sender, receiver) for receiver in (2, 3, 4) for sender in (0, 1)]
    for sender, receiver in pairs:
        found[sender].channel.send(data[sender], receiver)
        assert found[sender].channel.completed()[0] == receiver - 2, "nothing is buffered"
        found[receiver].channel.receive(data[receiver], sender)
        assert data[receiver].tolist() == [sender] * 3
    assert [found[rank].channel.completed() for rank in range(5)] == [(3, None), (3, None), *[(2, None)] * 3]
    for link in found.values():
        link.close()
    assert all(group.aborted for group in network.groups.values())


def test_a_rank_that_makes_no_communicator_fails_the_link_in_time(
    control: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "GRACE_SECONDS", 1.0)
    install(monkeypatch, network)
    links.LinkFacts(client(control), "x").set("member/2", "there:7")
    started = time.monotonic()
    found = join_in_threads(control, [0, 1], 3, SECONDS, "nccl")
    assert time.monotonic() - started < SECONDS + 1.0 + SLACK
    assert all(text.startswith("link x: rank ") and "there:7" in text for text in found.values()), found
    until(lambda: all(group.aborted for group in network.groups.values()), "the abort")


def test_links_of_a_rank_have_streams_of_their_own_as_long_as_there_are_any(
    control: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, network, streams=4)

    def join(name: str) -> transport.TransferLink:
        return transport.join_link(client(control), name, 0, 1, 20.0, "nccl", links.CPU)

    kept = [join("first"), join("second")]
    for number in range(9):  # of an engine that starts again and again
        link = join(f"third-{number}")
        assert len({id(each.process_group.stream) for each in (*kept, link)}) == 3
        link.close()
    kept += [join("third"), join("fourth")]
    with pytest.raises(transport.TransferError, match=r"link fifth: .*this rank has 4 links"):
        join("fifth")
    for link in kept:
        link.close()


def test_an_error_of_the_abort_ends_the_link_and_not_its_rank(caplog: pytest.LogCaptureFixture) -> None:
    group = SimpleNamespace(abort=Mock(side_effect=RuntimeError("NCCL error: operation in progress")))
    link = links.TransferLink(
        "x", 0, 2, 1.0, links.CPU, links.CPU, dist.HashStore(), None, group, NcclChannel(group, 0)
    )
    link.close()
    assert link.process_group is None
    assert "NCCL error: operation in progress" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
def test_an_nccl_link_neither_reads_nor_writes_the_key_that_ends_processes(control: Path) -> None:
    client(control).sync([("put", "exception_dump", "1")])
    joined = transport.join_link(client(control), "x", 0, 1, 20.0, "nccl", torch.device("cuda", 0))
    joined.close()
    assert not joined.channel.completed()[0]
    assert job_control.facts(control) == {"exception_dump", "link/x/store", "link/x/member/0", "link/x/done/0"}
