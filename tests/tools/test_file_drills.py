"""The short forms of the drills of files; their long forms are `make soak`."""

from __future__ import annotations

import pytest

from tools.drills import crash_points, damaged_records, double_start, file_errors, histories

SHORT_OR_LONG = pytest.mark.parametrize(
    "quick", [True, pytest.param(False, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])], ids=["short", "long"]
)


@SHORT_OR_LONG
def test_an_update_costs_the_same_at_the_end_of_a_long_run(quick: bool) -> None:
    found = histories.measure(quick)
    assert not found.problems, found.figures


@SHORT_OR_LONG
def test_a_run_resumes_after_a_crash_at_any_file_operation(quick: bool) -> None:
    found = crash_points.measure(quick)
    assert not found.problems, found.figures


@SHORT_OR_LONG
def test_a_second_launch_and_a_zombie_never_move_a_run_back(quick: bool) -> None:
    found = double_start.measure(quick)
    assert not found.problems, found.figures
    assert found.figures["zombies that ended with an error"] == found.figures["zombies"]


@SHORT_OR_LONG
def test_a_damaged_record_raises_only_errors_of_records(quick: bool) -> None:
    found = damaged_records.measure(quick)
    assert not found.problems, found.figures


@SHORT_OR_LONG
def test_every_writer_survives_a_disk_that_is_full_read_only_or_broken(quick: bool) -> None:
    found = file_errors.measure(quick)
    assert not found.problems, found.figures
