"""Creating, attaching and sweeping segments."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_webrl.ring.ring import NodeRing, Ring
from megatron_webrl.ring.segment import (
    NAMESPACE_OFFSET,
    SHM_FOLDER,
    RingError,
    accessors,
    load_libatomic,
    segment_name,
    sweep_segments,
    try_lifetime_lock,
)
from tests.ring.support import CAPACITY, PREFIX, RUN, kill, killed_at_line
from tests.waiting import exit_code, fork, run_apart


def test_a_segment_is_swept_once_no_process_has_it(name: str) -> None:
    def own() -> None:
        Ring.create_or_attach(name, CAPACITY, RUN)
        signal.pause()

    pid = fork(own)
    with Ring.attach(name, 10) as ring:
        kill(pid)
        assert sweep_segments(PREFIX) == []
        assert ring.write([b"x"], 1) == 0
    assert sweep_segments(PREFIX) == [name]
    assert not (SHM_FOLDER / name).exists()
    assert sweep_segments(PREFIX) == []


def kill_creator(name: str) -> None:
    def killed(line: int) -> bool:
        return killed_at_line(line, lambda: name, lambda n: Ring.create_or_attach(n, CAPACITY, RUN).write([b"x"], 1))

    line = 1
    while killed(line):
        if line % 2:
            with Ring.create_or_attach(name, CAPACITY, RUN) as ring:
                ring.acknowledge(ring.committed())
                assert ring.usage().bytes_used == 0
        left = [name] if (SHM_FOLDER / name).exists() else []
        assert sweep_segments(name) == left
        assert not (SHM_FOLDER / name).exists()
        line += 1
    assert line > 100


def test_a_segment_whose_creator_was_killed_before_any_line_can_be_used_or_swept(name: str) -> None:
    run_apart(kill_creator, name)


def test_processes_that_create_a_ring_at_once_get_the_same_ring(name: str) -> None:
    def write() -> None:
        with Ring.create_or_attach(name, CAPACITY, RUN) as ring:
            ring.write([b"x"], 5)
            ring.wait(range(7), 10)  # until all eight have written

    pids = [fork(write) for _ in range(8)]
    assert [exit_code(pid) for pid in pids] == [0] * 8
    with Ring.attach(name) as ring:
        assert ring.committed() == list(range(8))


@pytest.mark.parametrize("create", [True, False])
def test_a_segment_swept_between_opening_and_locking_is_not_used(name: str, create: bool, monkeypatch) -> None:
    def sweep_first(fd: int, kind: int) -> bool:
        monkeypatch.undo()
        assert sweep_segments(PREFIX) == [name]
        return try_lifetime_lock(fd, kind)

    Ring.create_or_attach(name, CAPACITY, RUN).close()
    monkeypatch.setattr("megatron_webrl.ring.segment.try_lifetime_lock", sweep_first)
    if create:
        with Ring.create_or_attach(name, CAPACITY, RUN) as ring:
            assert os.path.samestat(os.fstat(ring._segment.fd), os.stat(SHM_FOLDER / name))
    else:
        with pytest.raises(RingError, match="was not there"):
            Ring.attach(name, 0.2)


def test_sweep_leaves_foreign_files_other_prefixes_and_links_alone(name: str) -> None:
    foreign, link = SHM_FOLDER / f"{name}-foreign", SHM_FOLDER / f"{name}-link"
    foreign.write_bytes(b"not a ring at all")
    foreign.chmod(0o600)
    link.symlink_to(foreign)
    try:
        Ring.create_or_attach(name, CAPACITY, RUN).close()
        assert sweep_segments(f"{PREFIX}other-") == []
        assert sweep_segments(PREFIX) == [name]
        assert foreign.exists()
        assert link.is_symlink()
        with pytest.raises(RingError, match="it is no ring"):
            Ring.attach(foreign.name, 1)
    finally:
        link.unlink()
        foreign.unlink()
    with pytest.raises(RingError, match="needs a prefix"):
        sweep_segments("")


def test_a_sweep_leaves_a_segment_that_has_taken_the_name_meanwhile(name: str, monkeypatch) -> None:
    taken: list[Ring] = []

    def take_first(fd: int, kind: int) -> bool:
        monkeypatch.undo()
        (SHM_FOLDER / name).unlink()
        taken.append(Ring.create_or_attach(name, CAPACITY, RUN))
        return try_lifetime_lock(fd, kind)

    Ring.create_or_attach(name, CAPACITY, RUN).close()
    monkeypatch.setattr("megatron_webrl.ring.segment.try_lifetime_lock", take_first)
    assert sweep_segments(PREFIX) == []
    with taken[0]:
        assert (SHM_FOLDER / name).exists()


def test_a_symbolic_link_is_not_followed(name: str, tmp_path: Path) -> None:
    """Anyone can make one in shared memory, also of a file of this user."""
    (SHM_FOLDER / name).symlink_to(tmp_path / "file")
    with pytest.raises(RingError, match=f"{SHM_FOLDER / name} is a symbolic link"):
        Ring.create_or_attach(name, CAPACITY, RUN)
    assert not (tmp_path / "file").exists()


def test_child_programs_do_not_inherit_the_lock(name: str) -> None:
    ring = Ring.create_or_attach(name, CAPACITY, RUN)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as child:
        ring.close()
        assert sweep_segments(PREFIX) == [name]
        child.communicate(b"\n", timeout=10)


def test_unlinking_frees_the_name_and_leaves_attached_processes_working(name: str) -> None:
    with Ring.create_or_attach(name, CAPACITY, RUN) as old:
        old.unlink()
        with Ring.create_or_attach(name, CAPACITY, RUN) as new:
            old.write([b"old"], 1)
            assert new.committed() == []
            old.unlink()  # the name belongs to another segment
            assert (SHM_FOLDER / name).exists()


@pytest.mark.parametrize("prepared", [False, True])
def test_a_segment_that_another_user_can_reach_is_not_used(name: str, prepared: bool) -> None:
    """Anyone may make files in shared memory, and the names of rings over several nodes can be guessed."""
    path = SHM_FOLDER / name
    if prepared:
        Ring.create_or_attach(name, CAPACITY, RUN).close()
    else:
        path.touch()
    for owner, mode in ((0, 0o666), (0, 0o640), *(((65534, 0o600),) if os.geteuid() == 0 else ())):
        path.chmod(mode)
        if owner:  # only root may give files away
            os.chown(path, owner, -1)
        for use in (lambda: Ring.create_or_attach(name, CAPACITY, RUN), lambda: Ring.attach(name, 0.1)):
            with pytest.raises(RingError, match=f"must belong to this user|{path} belongs to another user"):
                use()


def test_attaching_waits_for_the_creator_up_to_the_limit(name: str) -> None:
    begun = time.monotonic()
    with pytest.raises(RingError, match=r"was not there within 0.2 s: no process created /dev/shm/"):
        Ring.attach(name, 0.2)
    assert time.monotonic() - begun < 10
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Ring.attach, name, 10)
        with Ring.create_or_attach(name, CAPACITY, RUN), waiting.result(10) as ring:
            assert (ring.job_id, ring.capacity) == (RUN, CAPACITY)


def test_the_ring_of_another_job_is_never_used_and_one_of_this_job_is_found_again(name: str) -> None:
    first, second = NodeRing(0, name, "first"), NodeRing(0, name, "second")
    with first.create_or_attach(CAPACITY) as ring:
        ring.write([b"stale"], 1)
        assert sweep_segments(PREFIX) == []
        for use, words in (
            (lambda: second.create_or_attach(CAPACITY), "exists with job id 'first' and 65536 .*, not 'second' and 65"),
            (lambda: first.create_or_attach(2 * CAPACITY), "65536 bytes, not 'first' and 131072"),
            (lambda: second.attach(0.2), rf"not there within 0.2 s: .*; the one at /dev/shm/{name} is of another job"),
        ):
            with pytest.raises(RingError, match=words):
                use()
    with first.create_or_attach(CAPACITY) as again:
        assert len(again.committed()) == 1
    assert sweep_segments(name) == [name]
    with second.create_or_attach(CAPACITY), second.attach(1) as ring:
        assert (ring.job_id, ring.committed()) == ("second", [])


def test_a_ring_larger_than_shared_memory_is_refused_before_it_is_used(name: str) -> None:
    free = os.statvfs(SHM_FOLDER)
    with pytest.raises(RingError, match=r"needs \d+ bytes, /dev/shm has \d+ free; lower ring.capacity_mib"):
        Ring.create_or_attach(name, free.f_blocks * free.f_frsize * 2, RUN)
    assert not (SHM_FOLDER / name).exists()


def test_a_segment_of_another_format_or_truncated_is_refused(name: str) -> None:
    Ring.create_or_attach(name, CAPACITY, RUN).close()
    for version, size, words in ((99, 10_000, "format 99, this program reads 1"), (1, 5000, "has 5000 of")):
        with (SHM_FOLDER / name).open("r+b") as file:
            os.pwrite(file.fileno(), version.to_bytes(8, "little"), 8)
            file.truncate(size)
        with pytest.raises(RingError, match=words):
            Ring.attach(name, 1)
    assert sweep_segments(PREFIX) == [name]  # a refused one is not held


def test_a_segment_of_another_pid_namespace_is_refused(name: str) -> None:
    with Ring.create_or_attach(name, CAPACITY, RUN), (SHM_FOLDER / name).open("r+b") as file:
        os.pwrite(file.fileno(), (os.stat("/proc/self/ns/pid").st_ino - 1).to_bytes(8, "little"), NAMESPACE_OFFSET)
        with pytest.raises(RingError, match="another PID namespace"):
            Ring.attach(name, 1)


def test_segment_names_are_plain_and_the_same_for_the_same_identity() -> None:
    assert segment_name("my run/ä", "job 7") == segment_name("my run/ä", "job 7")
    assert segment_name("my run/ä", "job 7").startswith("webrl-my_run__-")
    assert segment_name("r", "node 0") != segment_name("r", "node 1")


def test_without_libatomic_only_machines_with_ordered_memory_are_accepted() -> None:
    with pytest.raises(RingError, match="libatomic1"):
        accessors("aarch64", None)
    word = ctypes.c_uint64(5)
    for load, store in (accessors("x86_64", None), accessors("aarch64", load_libatomic())):
        store(ctypes.addressof(word), 2**63 + 1)
        assert load(ctypes.addressof(word)) == word.value == 2**63 + 1
        store(ctypes.addressof(word), 5)
