"""Damaged records are set aside and do not end a job."""

from __future__ import annotations

from pathlib import Path

from megatron_webrl.ring.record import MAX_KEPT, encode_trajectory, read_trajectory, undamaged_trajectories
from megatron_webrl.ring.ring import Ring
from tests.ring.support import RUN, damage
from tests.trajectories import trajectory


def test_a_damaged_record_is_set_aside_with_its_bytes(name: str, tmp_path: Path) -> None:
    with Ring.create_or_attach(name, 2**20, RUN) as ring:
        numbers = [ring.write(encode_trajectory(trajectory(ticket)), 1) for ticket in range(3)]
        damage(ring, 1)
        read = [read_trajectory(ring, number, tmp_path / "set" / "aside") for number in numbers]
        assert [each and each.ticket for each in read] == [0, None, 2]
        [kept] = (tmp_path / "set" / "aside").iterdir()
        assert kept.name == "1.record"
        assert kept.read_bytes() == bytes(ring.read(1, verify=False))
        assert sorted(undamaged_trajectories(ring, numbers)) == [0, 2]


def test_no_more_than_a_few_damaged_records_are_kept_and_a_full_disk_does_not_matter(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Ring.create_or_attach(name, 2**20, RUN) as ring:
        for _ in range(MAX_KEPT + 5):
            number = ring.write([b"no trajectory"], 1)
            assert read_trajectory(ring, number, tmp_path / "kept") is None
        assert len(list((tmp_path / "kept").iterdir())) == MAX_KEPT
        assert read_trajectory(ring, number, tmp_path / "file" / "no folder") is None
