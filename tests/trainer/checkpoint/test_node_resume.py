"""A trainer on two nodes is killed while both rings have unfinished groups; another attempt resumes.

`resumed`: in another job, from the checkpoint alone. `restarted`: in the same job, whose workers never stop.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.ring.ring import Ring
from megatron_webrl.track import episodes
from megatron_webrl.trainer.data import replay_buffer as group_files
from tests import forks
from tests.job_control import control_service
from tests.metrics_page import undocumented
from tests.trainer.checkpoint import node_resume_ranks as ranks
from tests.trainer.multi_node.node_ranks import group
from tests.trainer.multi_node.test_multi_node_exchange import make_rings
from tools.bench import recorded_groups

LIMIT = 120.0


@contextmanager
def job(folder: Path, names: list[str]) -> Iterator[Path]:
    """Run a control service and workers while the context is open."""
    with control_service(folder) as address:
        workers = [
            threading.Thread(target=ranks.work, args=(address, name, node), daemon=True)
            for node, name in enumerate(names)
        ]
        for worker in workers:
            worker.start()
        yield address
        # In a job the supervisor of the ranks ends it: here the test does.
        with suppress(JobFailed):  # after a finished job the service exits within seconds
            ControlClient(address, "test", connect_seconds=10.0).end_job("failed: the test ends this job")
        for worker in workers:
            worker.join(LIMIT)


def run_trainer(folder: Path, address: Path, names: list[str], resumed: bool) -> None:
    """Run the trainer until the job ends, or until the other rank fails after the killed one."""
    (folder / "rendezvous-2").unlink(missing_ok=True)
    context = forks.start(ranks.trainer_rank, str(folder), address, names, resumed, ranks=2)
    deadline = time.monotonic() + LIMIT
    for process in context.processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in context.processes]
    for process in context.processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    assert codes == ([0, 0] if resumed else [1, -signal.SIGKILL])


@pytest.fixture(scope="module", params=["resumed", "restarted"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two attempts of one run: record counts of the rings in between and at the end, and the run's files."""
    for names in make_rings():
        folder = tmp_path_factory.mktemp(request.param)
        run = ranks.make_run_folder(folder)
        with ExitStack() as stack:
            rings = [stack.enter_context(Ring.attach(name)) for name in names]
            if request.param == "resumed":
                with job(folder, names) as address:
                    run_trainer(folder, address, names, resumed=False)
                between, killed = [ring.usage().records for ring in rings], time.time()
                with job(folder, names) as address:
                    run_trainer(folder, address, names, resumed=True)
            else:
                with job(folder, names) as address:
                    run_trainer(folder, address, names, resumed=False)
                    between, killed = [ring.usage().records for ring in rings], time.time()
                    run_trainer(folder, address, names, resumed=True)
            yield {
                "kind": request.param, "between": between, "left": [ring.usage().records for ring in rings],
                "killed": killed, "saved": json.loads((run / "state.json").read_text()), "run": run,
                "lines": episodes.read_lines(run), "summary": json.loads((run / "summary.json").read_text()),
            }  # fmt: skip


def test_episodes_finished_under_the_dead_trainer_count_in_its_job_only(found: dict[str, Any]) -> None:
    saved = found["saved"]["accounting"]
    before = saved["trained"] + sum(saved["dropped"].values())
    adopted = [line for line in found["lines"][before:] if line["finished_at"] < found["killed"]]
    lost = episodes.read_rolled_back(found["run"])
    assert found["summary"]["accounting"]["rolled_back"] == len(lost)
    if found["kind"] == "resumed":
        assert not adopted
        assert not lost
    else:
        assert {line["worker"] for line in adopted} == {"rollout-0.1", "rollout-1.1"}
        # After the saved version the dead trainer had trained at least two updates.
        assert len([line for line in lost if line["disposition"] == episodes.TRAINED]) >= 2 * 2 * ranks.GROUPS
        again = {line["ticket"] for line in found["lines"]} & {line["ticket"] for line in lost}
        assert len(again) >= 2 * ranks.GROUPS


def test_both_rings_have_groups_that_the_killed_trainer_has_not_closed(found: dict[str, Any]) -> None:
    assert min(found["between"]) > 0


def test_the_accounting_matches_and_the_records_left_are_the_waiting_episodes(found: dict[str, Any]) -> None:
    accounting = found["summary"]["accounting"]
    assert accounting["matches"], accounting
    assert accounting["trained"] == 2 * ranks.GROUPS * ranks.UPDATES
    assert sum(found["left"]) == accounting["waiting"]
    assert found["summary"]["outcome"] == "finished"
    assert [update["version"] for update in found["summary"]["updates"]] == list(range(1, ranks.UPDATES + 1))


def test_no_group_is_trained_twice_and_every_update_has_its_groups(found: dict[str, Any]) -> None:
    lines = found["lines"]
    assert max(Counter((line["ticket"], line["index"]) for line in lines).values()) == 1
    trained: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        if line["disposition"] == episodes.TRAINED:
            trained[line["version"]].add(line["ticket"])
    assert {version: len(tickets) for version, tickets in trained.items()} == dict.fromkeys(
        range(ranks.UPDATES), ranks.GROUPS
    )
    assert {line["ticket"] for line in lines if line["disposition"] == "all_failed"} == {
        line["ticket"] for line in lines if not ranks.successes(line["ticket"])
    }


def test_no_ticket_is_skipped_and_the_open_tickets_of_the_checkpoint_are_reissued(found: dict[str, Any]) -> None:
    closed = {line["ticket"] for line in found["lines"]}
    assert found["saved"]["open_tickets"]
    assert found["saved"]["has_critic"] is False
    assert len(set(range(max(closed) + 1)) - closed) <= (ranks.AHEAD + 1) * ranks.GROUPS
    assert closed.issuperset(sorted(found["saved"]["open_tickets"])[: ranks.GROUPS])


def test_each_node_stores_the_records_of_its_ring_byte_for_byte(found: dict[str, Any]) -> None:
    nodes = set()
    for version in range(ranks.UPDATES):
        for node in (0, 1):
            for stored in recorded_groups.read_groups(
                group_files.group_file_path(found["run"] / "records", version, node)
            ):
                wanted = group(stored.ticket, node, ranks.successes(stored.ticket))
                for one, other in zip(stored.trajectories, wanted.trajectories, strict=True):
                    assert [bytes(image) for image in one.images] == list(other.images)
                    assert one.worker == f"rollout-{node}.1"
                nodes.add(node)
        groups = recorded_groups.read_groups_of_version(found["run"] / "records", version)
        trained = {
            line["ticket"] for line in found["lines"] if (line["version"], line["disposition"]) == (version, "trained")
        }
        assert {each.ticket for each in groups} == trained
    assert nodes == {0, 1}


def test_the_summary_has_the_traffic_between_nodes(found: dict[str, Any]) -> None:
    nodes, updates = found["summary"]["node_traffic"], found["summary"]["updates"]
    assert undocumented({name for update in updates for name in update["extra"]}) == []
    assert nodes["other_mib"] == pytest.approx(sum(update["extra"]["nodes/other_mib"] for update in updates))
    assert nodes["other_mib"] > 0
    assert nodes["images_mib"] == 0  # nothing made pixels: there is no model
    assert nodes["local_fraction"] == 1.0
