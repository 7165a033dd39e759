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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobEnded, JobFailed
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.track import episodes
from megatron_webrl.track.metrics import UpdateSeconds
from megatron_webrl.track.mlflow_upload import MLflowTracker
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState, read_trainer_state
from megatron_webrl.trainer.checkpoint.recovery import make_resume_point
from megatron_webrl.trainer.coordinator import Coordinator
from megatron_webrl.trainer.data import replay_buffer as group_files
from megatron_webrl.trainer.metrics.logprob_mismatch import LogprobMismatch
from megatron_webrl.trainer.telemetry import UpdateResult
from tests import forks, gloo
from tests.job_control import claim_tickets, connect, control_service
from tests.metrics_page import undocumented
from tests.trainer.data.test_task_sampler import METRICS
from tests.trainer.multi_node.nodes import Member, group, make_rings
from tools.bench import recorded_groups

pytestmark = pytest.mark.slow

LIMIT = 120.0
UPDATES, GROUPS, SAVED, KILLED, AHEAD = 12, 3, 2, 4, 2
"""The state of version SAVED is saved. From version KILLED on the rank of node 1 dies in the first update with groups
from both nodes, which are then in both rings.
"""


def make_config(folder: str) -> Config:
    """Two workers and two nodes."""
    config = Config()
    config.run.directory, config.cluster.nodes, config.rollout.engines = folder, 2, 2
    config.trainer.updates, config.trainer.groups_per_update = UPDATES, GROUPS
    config.rollout.max_staleness = AHEAD
    config.tracking.keep_records = True
    return config


def successes(ticket: int) -> int:
    """Number of successes among the two episodes of a ticket; some groups fail as a whole and are dropped."""
    return int(ticket % 5 != 3)


def trainer_rank(rank: int, folder: str, address: Path, names: list[str], resumed: bool) -> None:
    """One attempt of a trainer rank; `resumed`: from the saved state."""
    gloo.join(rank, 2, folder)
    member = Member(Path(folder), names, exchange_seconds=10.0)
    config, control = make_config(folder), connect(address, f"trainer-{rank}")
    state = TrainerState(0, 0, 0, (), Accounting().state_dict(), 0)
    if resumed:
        read = read_trainer_state(config.run_folder)
        state = replace(read, restart_epoch=read.restart_epoch + 1)
    tracker = MLflowTracker(config) if rank == 0 else None
    resume_point = make_resume_point(control, member.rings, state, config.run_folder, rank == 0)
    coordinator = Coordinator(config, control, member.rings, state, resume_point, tracker)
    if rank == 0:
        control.put_json("test/version", state.version)  # workers read it once they can claim tickets
    coordinator.open_job(state.version)
    for version in range(state.version, UPDATES):
        groups = coordinator.collect(version, lambda: False)
        assert isinstance(groups, list)
        workers = {trajectory.worker for each in groups for trajectory in each.trajectories}
        if rank == 1 and version >= KILLED and len(workers) == 2 and not resumed:
            os.kill(os.getpid(), signal.SIGKILL)
        coordinator.log_update(
            UpdateResult(version + 1, groups, METRICS, LogprobMismatch({}), UpdateSeconds(1, 1, 1, 1, 0), {})
        )
        coordinator.close_update(groups, version + 1)
        if rank == 0:
            control.put_json("test/version", version + 1)
            if version + 1 == SAVED:
                (config.run_folder / "state.json").write_text(
                    json.dumps(asdict(coordinator.trainer_state(version + 1)))
                )
    coordinator.end_job(UPDATES, True)


def work(address: Path, name: str, worker: int) -> None:
    """The worker of node `worker`: writes the groups of its tickets until the job ends; on node 1 it is slower."""
    control, finished, written = connect(address, f"rollout-{worker}"), 0, 0
    with Ring.attach(name) as ring, suppress(JobFailed):
        try:
            while True:
                control.check_job()
                claims = claim_tickets(control, 1)
                for claim in claims:
                    version = control.get_json("test/version")
                    ticket = claim.ticket
                    assert isinstance(version, int)
                    made = group(ticket, worker, successes(ticket), version)
                    for each in made.trajectories:
                        finished += 1
                        now = replace(each, restart_epoch=claim.restart_epoch, finished_at=time.time())
                        ring.write(encode_trajectory(now), 10.0)
                        written += 1
                    control.close_ticket(claim.ticket)
                time.sleep(0.04 * worker + 0.02)
        except JobEnded:
            final = {"instance_id": f"rollout-{worker}.1", "finished": finished, "unwritten": finished - written}
            control.put_json(f"final_counts/rollout-{worker}", final)


@contextmanager
def job(folder: Path, names: list[str]) -> Iterator[Path]:
    """Run a control service and workers while the context is open."""
    with control_service(folder) as address:
        workers = [
            threading.Thread(target=work, args=(address, name, node), daemon=True) for node, name in enumerate(names)
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
    context = forks.start(trainer_rank, str(folder), address, names, resumed, ranks=2)
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
    folder = tmp_path_factory.mktemp(request.param)
    run = make_config(str(folder)).run_folder
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    with make_rings() as names, ExitStack() as stack:
        rings = [stack.enter_context(Ring.attach(name)) for name in names]
        with ExitStack() as first:
            address = first.enter_context(job(folder, names))
            run_trainer(folder, address, names, resumed=False)
            if request.param == "resumed":
                first.close()
            between, killed = [ring.usage().records for ring in rings], time.time()
            if request.param == "resumed":
                address = first.enter_context(job(folder, names))
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
        assert len([line for line in lost if line["disposition"] == episodes.TRAINED]) >= 2 * 2 * GROUPS
        again = {line["ticket"] for line in found["lines"]} & {line["ticket"] for line in lost}
        assert len(again) >= 2 * GROUPS


def test_the_accounting_matches_and_the_records_left_are_the_waiting_episodes(found: dict[str, Any]) -> None:
    accounting = found["summary"]["accounting"]
    assert min(found["between"]) > 0
    assert accounting["matches"], accounting
    assert accounting["trained"] == 2 * GROUPS * UPDATES
    assert sum(found["left"]) == accounting["waiting"]
    assert found["summary"]["outcome"] == "finished"
    assert [update["version"] for update in found["summary"]["updates"]] == list(range(1, UPDATES + 1))


def test_no_group_is_trained_twice_and_every_update_has_its_groups(found: dict[str, Any]) -> None:
    lines = found["lines"]
    assert max(Counter((line["ticket"], line["index"]) for line in lines).values()) == 1
    trained: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        if line["disposition"] == episodes.TRAINED:
            trained[line["version"]].add(line["ticket"])
    assert {version: len(tickets) for version, tickets in trained.items()} == dict.fromkeys(range(UPDATES), GROUPS)
    assert {line["ticket"] for line in lines if line["disposition"] == "all_failed"} == {
        line["ticket"] for line in lines if not successes(line["ticket"])
    }


def test_no_ticket_is_skipped_and_the_open_tickets_of_the_checkpoint_are_reissued(found: dict[str, Any]) -> None:
    closed = {line["ticket"] for line in found["lines"]}
    assert found["saved"]["open_tickets"]
    assert found["saved"]["has_critic"] is False
    assert len(set(range(max(closed) + 1)) - closed) <= (AHEAD + 1) * GROUPS
    assert closed.issuperset(sorted(found["saved"]["open_tickets"])[:GROUPS])


def test_each_node_stores_the_records_of_its_ring_byte_for_byte(found: dict[str, Any]) -> None:
    nodes = set()
    for version in range(UPDATES):
        for node in (0, 1):
            for stored in recorded_groups.read_groups(
                group_files.group_file_path(found["run"] / "records", version, node)
            ):
                wanted = group(stored.ticket, node, successes(stored.ticket))
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
