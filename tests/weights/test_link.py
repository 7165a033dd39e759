"""Joining a link: its store, ranks that die or stop while it is formed, and the options of its NCCL group."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_webrl.control.connection import Connection
from megatron_webrl.control.group_store import host_group_store
from megatron_webrl.weights import link, transport
from megatron_webrl.weights import link as links
from megatron_webrl.weights.link import NcclChannel
from tests import forks, job_control
from tests.waiting import until

SECONDS = 2.0
SLACK = 10.0  # seconds that a busy machine may exceed a timeout
TORCH_STUB = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Path]:
    with job_control.control_service(tmp_path) as address:
        yield address


def client(control: Path) -> Connection:
    return Connection(control, "test", 30)


def join_in_threads(control: Path, ranks: list[int], size: int, seconds: float = SECONDS) -> dict[int, Any]:
    """Join ranks of link "x" at once; returns each one's link or error."""
    found: dict[int, Any] = {}

    def join(rank: int) -> None:
        try:
            found[rank] = transport.join_link(client(control), "x", rank, size, seconds, "gloo")
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


def test_the_groups_keys_stay_out_of_the_facts_of_the_job(control: Path) -> None:
    found = join_in_threads(control, [0, 1], 2, 20.0)
    own = found[0].group_store
    assert own.list_keys(), "the group has exchanged its addresses over its own store"
    assert {key for key in job_control.facts(control) if key.startswith("link/")} == {
        "link/x/store",
        *(f"link/x/{key}/{r}" for key in ("member", "done") for r in (0, 1)),
    }
    own.set("exception_dump", "1")
    assert found[1].group_store.check(["exception_dump"])
    assert "exception_dump" not in job_control.facts(control)
    for each in found.values():
        each.close()


def test_a_store_ends_with_its_link(control: Path) -> None:
    found = join_in_threads(control, [0, 1], 2, 20.0)
    address = (found[1].group_store.host, found[1].group_store.port)
    socket.create_connection(address, 5).close()
    found[0].close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 5)
    found[1].close()


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
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


def test_a_rank_that_cannot_host_the_store_says_so(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_webrl.control.group_store.own_address", lambda *_: "192.0.2.1")  # of no machine
    with pytest.raises(transport.TransferError, match=r"link x: rank 0 \(.*\) cannot host a store: .*assign"):
        transport.join_link(client(control), "x", 0, 2, SECONDS, "gloo")


class Options:
    """The attributes of ProcessGroupNCCL.Options that a link sets; torch has the class on CUDA only."""

    class Config:
        blocking = max_ctas = -1

    def __init__(self) -> None:
        self._timeout, self.config = timedelta(), self.Config()


def test_nccl_connects_in_the_background_and_fires_after_the_transfers_timeout() -> None:
    options = Options()
    link.set_link_options(options, 300.0)
    assert options._timeout == timedelta(seconds=310)
    assert (options.config.blocking, options.config.max_ctas) == (0, 4)


class Recorder:
    """A rank's NCCL group and its wrapper, which torch has on CUDA only; records the calls."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.calls = lambda: rank, lambda: size, list[Any]()

    def _register_backend(self, device: Any, kind: Any, group: Any) -> None:
        self.calls.append("register")

    def _start_coalescing(self, device: Any) -> None:
        self.calls.append("start")

    def _end_coalescing(self, device: Any) -> str:
        self.calls.append("end")
        return "work"

    def send(self, tensors: list[Any], peer: int, tag: int) -> None:
        self.calls.append(("send", peer))

    def recv(self, tensors: list[Any], peer: int, tag: int) -> None:
        self.calls.append(("receive", peer))


def test_each_sender_is_connected_to_each_receiver_at_once() -> None:
    for rank, messages in (
        (0, [("send", 2), ("send", 3), ("send", 4)]), (3, [("receive", 0), ("receive", 1)])
    ):  # fmt: skip
        recorder = Recorder(rank, 5)
        assert link.connect_pairs(recorder, recorder, 2, torch.device("cpu")) == "work"
        assert recorder.calls == ["register", "start", *messages, "end"]


def test_an_error_of_the_abort_ends_the_link_and_not_its_rank(caplog: pytest.LogCaptureFixture) -> None:
    class Group:
        def abort(self) -> None:
            raise RuntimeError("NCCL error: operation in progress")

    link = links.TransferLink(
        "x", 0, 2, 1.0, links.CPU, links.CPU, dist.HashStore(), None, Group(), NcclChannel(Group())
    )
    link.close()
    assert link.process_group is None
    assert "could not be aborted: NCCL error: operation in progress" in caplog.text


def test_torch_declares_the_options_of_a_link() -> None:
    stub = TORCH_STUB.read_text()
    config = stub[stub.index("class NCCLConfig:") :]
    assert {"blocking", "max_ctas"} <= set(
        re.findall(r"^        (\w+): int$", config[: config.index("class ") + 800], re.M)
    )
    wrapper = stub[stub.index("class ProcessGroup:") :]
    for name in ("_register_backend", "_start_coalescing", "_end_coalescing"):
        assert f"def {name}(" in wrapper[: wrapper.index("\nclass ")]
    options = stub[stub.index("class Options:", stub.index("class Backend")) :]
    assert "def _timeout(self, val: timedelta)" in options[:600]


def test_variables_of_the_constructor_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    before = dict(os.environ)
    seen: list[str] = []

    def construct() -> None:
        with link.environment_variables(link.CONSTRUCTOR_VARIABLES):
            seen.extend(os.environ[name] for name in ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"))
            raise LookupError

    with pytest.raises(LookupError):
        construct()
    assert seen == ["1", "0"]
    assert dict(os.environ) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
def test_an_nccl_link_neither_reads_nor_writes_the_key_that_ends_processes(control: Path) -> None:
    client(control).set("exception_dump", "1")
    joined = transport.join_link(client(control), "x", 0, 1, 20.0, "nccl")
    joined.close()
    assert not joined.channel.completed()[0]
    assert job_control.facts(control) == {
        "exception_dump",
        "link/x/store",
        "link/x/member/0",
        "link/x/done/0",
    }


def test_the_facts_of_a_link_are_its_own(control: Path) -> None:
    store, other = (links.LinkFacts(client(control), name) for name in ("a", "b"))
    assert not store.check(["member/0"])
    store.set("sums", "[1, 2]")
    store.set("member/0", "host:1")
    assert store.multi_get(["sums", "member/0"]) == ["[1, 2]", "host:1"]
    assert store.set_first("failed", "first") == store.set_first("failed", "second") == "first"
    assert not other.check(["sums"])
    store.delete_key("sums")
    assert not store.check(["member/0", "sums"])
