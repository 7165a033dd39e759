"""Training over machines: train_cpu.sh on a real Slurm whose nodes have names, addresses and memory of their own."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient

from megatron_webrl.config.load import parse_config
from megatron_webrl.launch import watchdog
from megatron_webrl.track import episodes, events
from tests.finished_runs import run_problems
from tests.launch.slurm.slurm_jobs import ROOT, leftovers_on, log, overrides, rings, submit
from tests.launch.slurm.virtual_nodes import address
from tests.launch.slurm.virtual_slurm import Cluster, virtual_slurm, why_not
from tests.waiting import until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(why_not(namespaces=True)), reason=why_not(namespaces=True) or "-"),
]
UPDATES, GROUPS, STALENESS = 6, 2, 1
QUICKSTART = (
    f"trainer.updates={UPDATES}", f"trainer.groups_per_update={GROUPS}", "trainer.minibatches=1",
    "rollout.group_size=4", "rollout.groups_in_flight=2",
    f"rollout.max_staleness={STALENESS}", "evaluation.before=false", "evaluation.after=false",
    "evaluation.blank_images=false", "evaluation.greedy=false",
)  # fmt: skip
"""configs/quickstart.yaml in small: two trainer ranks, one and an engine on each of two nodes."""
NODES = ("n1", "n2", "n3", "n4")
NAMES = (("control", "trainer-0", "rollout-0"), ("trainer-1", "rollout-1"))


@pytest.mark.timeout(900)
def test_the_quickstart_trains_on_two_machines_and_resumes_after_a_signal(tmp_path: Path) -> None:
    name = f"machines{os.getpid()}"
    run = tmp_path / name
    with virtual_slurm(4, namespaces=True, shared=(tmp_path,)) as cluster:
        job = submit(
            cluster, tmp_path, "train_cpu.sh", *overrides(tmp_path, name), *QUICKSTART, options=("--nodes=2",),
            MLFLOW_TRACKING_URI="",
        )  # fmt: skip
        until(lambda: f"job: update 1 of {UPDATES}" in log(tmp_path), lambda: f"an update: {log(tmp_path)}", 400)
        check_that_nodes_hold_what_is_theirs(cluster, name)
        check_stacks(run)
        with stopped_engines(cluster):  # so that updates are left when the notice arrives
            cluster.run("scancel", "--batch", "--signal=USR1", job)
            until(lambda: "job: stop requested" in log(tmp_path), lambda: f"the notice: {log(tmp_path)}", 90)
        assert cluster.wait(job, 400) == "COMPLETED", log(tmp_path)
        assert cluster.show(job)["Restarts"] == "1", log(tmp_path)
        until(
            lambda: not any(leftovers_on(cluster, node) for node in NODES),
            lambda: f"{leftovers_on(cluster, 'n2')} to go",
            30,
        )
    text = log(tmp_path)
    assert f"job: control service at {address(1)}:" in text
    assert "job: state:      preempted; " in text
    resumed = rf"job: launch 2 of job {job}, resuming from version-00000\d; the previous launch ended: pre"
    assert re.search(resumed, text)
    assert re.findall(rf"job: update (\d+) of {UPDATES}", text) == [str(n) for n in range(1, UPDATES + 1)]
    assert run_problems(run, UPDATES, (STALENESS + 1) * GROUPS) == []
    nodes = json.loads((run / "summary.json").read_text())["node_traffic"]
    assert nodes["images_mib"] > 0
    assert 0 <= nodes["local_fraction"] <= 1
    started = {event.role: event for event in events.read_events(run) if event.event == events.STARTED}
    assert (started["rollout-1"].node, started["rollout-1"].host, started["rollout-1"].slurm_job_id) == (1, "n2", job)
    for node, names in enumerate(NAMES):
        assert set(names) <= {path.stem for path in (run / "logs" / f"node-{node}").iterdir()}
    client = MlflowClient(parse_config(run / "config.yaml").tracking_uri)
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert found.info.status == "FINISHED"
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "loss")]
    assert steps == list(range(1, UPDATES + 1))


@pytest.mark.timeout(900)
def test_an_engine_that_spans_two_machines_serves_a_job(tmp_path: Path) -> None:
    name, updates = f"span{os.getpid()}", 5
    run = tmp_path / name
    with virtual_slurm(2, namespaces=True, shared=(tmp_path, ROOT)) as cluster:
        job = submit(
            cluster, tmp_path, "train_cpu.sh", *overrides(tmp_path, name), *QUICKSTART, f"trainer.updates={updates}",
            "rollout.engines=1", "rollout.pipeline_parallel=2", options=("--nodes=2",), MLFLOW_TRACKING_URI="",
        )  # fmt: skip
        until(lambda: "update 1 of" in log(tmp_path), lambda: f"an update: {log(tmp_path)}", 600)
        assert [len(rings(name, cluster.path(node, "/dev/shm"))) for node in ("n1", "n2")] == [1, 1]
        watchdog.request_stack_dump(run, "a test wants to see them")
        part = run / "logs" / "node-1" / "rollout-0.follower-1.log"
        until(lambda: "-- stacks of VLLM" in part.read_text(), lambda: part.read_text()[-2000:], 60)
        assert cluster.wait(job, 400) == "COMPLETED", log(tmp_path)
        until(lambda: not any(leftovers_on(cluster, node) for node in ("n1", "n2")), "all to go", 30)
    assert run_problems(run, updates, (STALENESS + 1) * GROUPS) == []
    started = {event.role: event.host for event in events.read_events(run) if event.event == events.STARTED}
    assert (started["rollout-0"], started["rollout-0.follower-1"]) == ("n1", "n2")
    assert {line["worker"] for line in episodes.read_lines(run)} == {"rollout-0.1"}


def check_that_nodes_hold_what_is_theirs(cluster: Cluster, name: str) -> None:
    """A ring on each node of the job, which differ, and nothing on the others."""
    rings_of_nodes = {node: rings(name, cluster.path(node, "/dev/shm")) for node in NODES}
    assert [len(each) for each in rings_of_nodes.values()] == [1, 1, 0, 0]
    assert rings_of_nodes["n1"][0].name != rings_of_nodes["n2"][0].name
    assert [bool(leftovers_on(cluster, node)) for node in NODES] == [True, True, False, False]


def check_stacks(run: Path) -> None:
    """Stacks that are asked for come from every role and its engine."""
    watchdog.request_stack_dump(run, "a test wants to see them")
    logs = {role: run / "logs" / f"node-{node}" / f"{role}.log" for node in (0, 1) for role in NAMES[node]}
    logs.pop("control")
    until(lambda: all("-- stacks of" in path.read_text() for path in logs.values()), f"stacks in {run}", 60)
    until(lambda: all("-- stacks of VLLM" in logs[role].read_text() for role in ("rollout-0", "rollout-1")), "", 60)


@contextmanager
def stopped_engines(cluster: Cluster) -> Iterator[None]:
    """The engines of the job on n1 and n2 stand still."""
    found = [each for node in ("n1", "n2") for each in cluster.processes(node) if "EngineCor" in each.name()]
    assert len(found) == 2
    for process in found:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
