"""Creating, attaching and sweeping segments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import (
    SHM_FOLDER,
    RingError,
    accessors,
    load_libatomic,
    segment_name,
    sweep_segments,
    try_lifetime_lock,
)
from tests.ring.support import PREFIX, RUN, exit_code, fork, killed_at_line

SIZE = 64 * 1024


def test_a_segment_with_an_attached_process_is_not_swept(name: str) -> None:
    with Ring.create_or_attach(name, SIZE, RUN) as ring:
        assert sweep_segments(PREFIX) == []
        assert ring.write([b"x"], 1) == 0
    assert sweep_segments(PREFIX) == [name]
    assert not (SHM_FOLDER / name).exists()
    assert sweep_segments(PREFIX) == []


def test_the_segment_of_a_killed_owner_is_swept(name: str) -> None:
    def own() -> None:
        Ring.create_or_attach(name, SIZE, RUN)
        signal.pause()

    pid = fork(own)
    Ring.attach(name, 10).close()
    assert sweep_segments(PREFIX) == []
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL
    assert sweep_segments(PREFIX) == [name]


def test_a_segment_whose_creator_was_killed_before_any_line_can_be_used_or_swept(name: str) -> None:
    def killed(line: int) -> bool:
        return killed_at_line(line, lambda: name, lambda n: Ring.create_or_attach(n, SIZE, RUN).write([b"x"], 1))

    line = 1
    while killed(line):
        if line % 2:
            with Ring.create_or_attach(name, SIZE, RUN) as ring:
                ring.acknowledge(ring.committed())
                assert ring.usage().bytes_used == 0
        left = [name] if (SHM_FOLDER / name).exists() else []
        assert sweep_segments(PREFIX) == left
        assert not (SHM_FOLDER / name).exists()
        line += 1
    assert line > 100


def test_processes_that_create_a_ring_at_once_get_the_same_ring(name: str) -> None:
    def write() -> None:
        with Ring.create_or_attach(name, SIZE, RUN) as ring:
            ring.write([b"x"], 5)
            ring.wait(range(7), 10)  # until all eight have written

    pids = [fork(write) for _ in range(8)]
    assert [exit_code(pid) for pid in pids] == [0] * 8
    with Ring.attach(name) as ring:
        assert ring.committed() == list(range(8))


def test_creating_while_others_sweep_never_gives_a_ring_without_a_name(name: str) -> None:
    def sweep_forever() -> None:
        while True:
            sweep_segments(PREFIX)

    pid = fork(sweep_forever)
    try:
        for _ in range(200):
            with Ring.create_or_attach(name, 4096, RUN) as ring:
                assert os.path.samestat(os.fstat(ring._segment.fd), os.stat(SHM_FOLDER / name))
    finally:
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)


@pytest.mark.parametrize("create", [True, False])
def test_a_segment_swept_between_opening_and_locking_is_not_used(name: str, create: bool, monkeypatch) -> None:
    def sweep_first(fd: int, kind: int) -> bool:
        monkeypatch.undo()
        assert sweep_segments(PREFIX) == [name]
        return try_lifetime_lock(fd, kind)

    Ring.create_or_attach(name, SIZE, RUN).close()
    monkeypatch.setattr("megatron_webrl.ring.segment.try_lifetime_lock", sweep_first)
    if create:
        with Ring.create_or_attach(name, SIZE, RUN) as ring:
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
        Ring.create_or_attach(name, SIZE, RUN).close()
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


def test_child_programs_do_not_inherit_the_lock(name: str) -> None:
    ring = Ring.create_or_attach(name, SIZE, RUN)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as child:
        ring.close()
        assert sweep_segments(PREFIX) == [name]
        child.communicate(b"\n", timeout=10)


def test_unlinking_frees_the_name_and_leaves_attached_processes_working(name: str) -> None:
    with Ring.create_or_attach(name, SIZE, RUN) as old:
        old.unlink()
        with Ring.create_or_attach(name, SIZE, RUN) as new:
            old.write([b"old"], 1)
            assert new.committed() == []
            old.unlink()  # the name belongs to another segment
            assert (SHM_FOLDER / name).exists()


def test_another_size_or_job_is_refused_with_both_values(name: str) -> None:
    with Ring.create_or_attach(name, SIZE, RUN):
        with pytest.raises(RingError, match=r"job id 'test run' and 65536 bytes, not 'test run' and 131072 bytes"):
            Ring.create_or_attach(name, 2 * SIZE, RUN)
        with pytest.raises(RingError, match="not 'other' and 65536"):
            Ring.create_or_attach(name, SIZE, "other")


@pytest.mark.parametrize(("owner", "mode"), [(0, 0o666), (0, 0o640), (65534, 0o600)])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_segment_that_another_user_can_reach_is_not_used(name: str, owner: int, mode: int, prepared: bool) -> None:
    """Anyone may make files in shared memory, and the names of rings over several nodes can be guessed."""
    if owner and os.geteuid() != 0:
        pytest.skip("only root may give files away")
    path = SHM_FOLDER / name
    if prepared:
        Ring.create_or_attach(name, SIZE, RUN).close()
    else:
        path.touch()
    if owner:
        os.chown(path, owner, -1)
    path.chmod(mode)
    for use in (lambda: Ring.create_or_attach(name, SIZE, RUN), lambda: Ring.attach(name, 0.1)):
        with pytest.raises(RingError, match=f"must belong to this user|{path} belongs to another user"):
            use()
    path.unlink()


def test_attaching_waits_for_the_creator_up_to_the_limit(name: str) -> None:
    begun = time.monotonic()
    with pytest.raises(RingError, match=r"was not there within 0.2 s: no process created /dev/shm/"):
        Ring.attach(name, 0.2)
    assert time.monotonic() - begun < 10
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Ring.attach, name, 10)
        with Ring.create_or_attach(name, SIZE, RUN), waiting.result(10) as ring:
            assert (ring.job_id, ring.capacity) == (RUN, SIZE)


def test_a_ring_of_another_job_counts_as_missing_and_can_be_swept(name: str) -> None:
    Ring.create_or_attach(name, 5000, "one").close()
    with pytest.raises(
        RingError, match=rf"not there within 0.2 s: .*; the one at /dev/shm/{name} is of another job, one"
    ):
        Ring.attach(name, 0.2, "two")
    assert sweep_segments(name) == [name]
    with Ring.create_or_attach(name, 5000, "two"), Ring.attach(name, 1, "two") as ring:
        assert ring.job_id == "two"
        ring.unlink()


def test_a_ring_larger_than_shared_memory_is_refused_before_it_is_used(name: str) -> None:
    free = os.statvfs(SHM_FOLDER)
    with pytest.raises(RingError, match=r"needs \d+ bytes, /dev/shm has \d+ free; lower ring.capacity_mib"):
        Ring.create_or_attach(name, free.f_blocks * free.f_frsize * 2, RUN)
    assert not (SHM_FOLDER / name).exists()


@pytest.mark.parametrize("bad", ["", "a/b", "..", ".hidden", "x" * 300])
def test_a_name_that_is_not_a_plain_file_name_is_refused(bad: str) -> None:
    with pytest.raises(RingError, match="is not a plain file name"):
        Ring.create_or_attach(bad, SIZE, RUN)


def test_a_segment_of_another_format_or_truncated_is_refused(name: str) -> None:
    Ring.create_or_attach(name, SIZE, RUN).close()
    with (SHM_FOLDER / name).open("r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(8, "little"))
    with pytest.raises(RingError, match="format 99, this program reads 1"):
        Ring.attach(name, 1)
    with (SHM_FOLDER / name).open("r+b") as file:
        file.seek(8)
        file.write((1).to_bytes(8, "little"))
        file.truncate(5000)
    with pytest.raises(RingError, match="has 5000 of"):
        Ring.attach(name, 1)


def test_segment_names_are_plain_and_the_same_for_the_same_identity() -> None:
    assert segment_name("my run/ä", "job 7") == segment_name("my run/ä", "job 7")
    assert segment_name("my run/ä", "job 7").startswith("webrl-my_run__-")
    assert segment_name("r", "a") != segment_name("r", "b")


def test_without_libatomic_only_machines_with_ordered_memory_are_accepted() -> None:
    with pytest.raises(RingError, match="libatomic1"):
        accessors("aarch64", None)
    import ctypes

    word = ctypes.c_uint64(5)
    for load, store in (accessors("x86_64", None), accessors("aarch64", load_libatomic())):
        store(ctypes.addressof(word), 2**63 + 1)
        assert load(ctypes.addressof(word)) == word.value == 2**63 + 1
        store(ctypes.addressof(word), 5)
