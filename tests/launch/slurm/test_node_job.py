"""A whole job on two nodes, which are this machine twice: that of test_slurm.py without Slurm, its files looked at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megatron_webrl.control import child_process
from megatron_webrl.launch.roles import webrl_command
from megatron_webrl.launch.run_folder import write_job
from megatron_webrl.launch.validation import load_config
from megatron_webrl.monitor.episode_index import MAX_PAGE, EpisodeIndex, EpisodeQuery
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.track import episodes, summary
from tests.finished_runs import run_problems
from tests.monitor.finished_jobs import check_timeline
from tests.tiny_settings import SETTINGS
from tools.bench import recorded_groups

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]

LIMIT = 700.0


class NodeJob:
    """Control service, a trainer rank on each of two nodes, and there a worker or a part of an engine."""

    def __init__(self, folder: Path, model: Path, engine_stages: int = 1, **trainer: Any) -> None:
        name = f"n{os.getpid()}"
        settings: dict[str, Any] = {**SETTINGS, "model": {"path": str(model)}}
        settings["run"] = {"name": name, "directory": str(folder / "runs")}
        settings["trainer"] = {**SETTINGS["trainer"], "data_parallel": 2, **trainer}
        rollout = {"engines": 2 // engine_stages, "pipeline_parallel": engine_stages}
        settings["rollout"] = {**SETTINGS["rollout"], **rollout}
        settings["cluster"], settings["tracking"] = {"nodes": 2}, {"keep_records": True, "timeline": True}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        self.config = load_config(folder / "config.yaml")
        self.folder = self.config.run_folder
        (self.folder / "logs").mkdir(parents=True)
        write_job(self.config, place_processes(self.config))
        self.roles: dict[str, Any] = {}
        self.clock_of_node_1: list[str] = []  # a command that gives its roles a clock of their own

    def start(self, name: str, *arguments: str, **environment: str) -> None:
        command = webrl_command(["role", str(self.folder), *arguments])
        full = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        full.pop("MLFLOW_TRACKING_URI", None)
        command = [*self.clock_of_node_1, *command] if name.endswith("-1") else command
        self.roles[name] = child_process.start_process(command, self.log(name), full, name)

    def start_all(self) -> None:
        address = self.folder / "control.json"
        self.start("control", "control", "--journal", str(self.folder / "control.journal"))
        deadline = time.monotonic() + 120
        while not address.is_file():
            assert time.monotonic() < deadline, self.log("control").read_text()
            time.sleep(0.05)
        for node in ("0", "1"):
            self.start(f"rollout-{node}", f"rollout-{node}")
            place = {"RANK": node, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
            self.start(f"trainer-{node}", f"trainer-{node}", **place)

    def start_nodes(self) -> None:
        """The same through what a Slurm step runs on each node."""
        path, port = str(self.folder / "config.yaml"), socket.create_server(("127.0.0.1", 0)).getsockname()[1]
        self.config.cluster.base_port = port
        write_job(self.config, place_processes(self.config))
        parts = [("control", ["--host", "127.0.0.1"])]
        parts += [(role, ["--node", str(node)]) for node in (0, 1) for role in ("rollout", "trainer")]
        for role, arguments in parts:
            name = f"node-{arguments[-1]}-{role}"
            command = [sys.executable, "-m", "megatron_webrl", "node", role, path, *arguments]
            environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
            self.roles[name] = child_process.start_process(command, self.log(name), environment, name)

    def role(self, name: str) -> psutil.Process | None:
        """A process that one of the nodes has started."""
        for node in self.roles.values():
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(node.pid).children():
                    if process.environ().get("WEBRL_ROLE") == name:
                        return process
        return None

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + LIMIT
        while not (found := condition()):
            codes = {name: role.poll() for name, role in self.roles.items()}
            assert not any(codes.values()), f"the job ended before {what}: {codes}"
            assert time.monotonic() < deadline, f"no {what}"
            time.sleep(0.1)
        return found

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def wait(self) -> dict[str, int | None]:
        deadline = time.monotonic() + LIMIT
        while any(role.poll() is None for role in self.roles.values()) and time.monotonic() < deadline:
            if any(role.poll() for role in self.roles.values()):
                break
            time.sleep(0.2)
        return {name: role.poll() for name, role in self.roles.items()}


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Iterator[NodeJob]:
    made = NodeJob(tmp_path, tiny_model)
    yield made
    for role in made.roles.values():
        child_process.kill_process_group(role.pid)


def test_a_killed_rank_is_restarted_together_with_the_rank_of_the_other_node(tmp_path: Path, tiny_model: Path) -> None:
    updates = 6
    job = NodeJob(tmp_path, tiny_model, updates=updates, checkpoint={"every": 2})
    try:
        job.start_nodes()
        latest = job.folder / "checkpoints" / "latest"
        job.until(lambda: latest.is_file() and len(summary.read_updates(job.folder)) >= 3, "a checkpoint")
        ranks = [job.until(lambda: job.role(f"trainer-{node}"), "a rank") for node in (0, 1)]  # noqa: B023
        workers = [job.until(lambda: job.role(f"rollout-{node}"), "a worker") for node in (0, 1)]  # noqa: B023
        ranks[1].kill()
        for node in (0, 1):
            log = job.log(f"node-{node}-trainer")
            job.until(lambda: "restarting all trainer ranks" in log.read_text(), "another start")  # noqa: B023
            assert job.until(lambda: job.role(f"trainer-{node}"), "another rank") != ranks[node]  # noqa: B023
        job.until(lambda: "resumes from version" in (job.folder / "logs/node-0/trainer-0.log").read_text(), "take-over")
        assert all(worker.is_running() for worker in workers)
        codes = job.wait()
    finally:
        for role in job.roles.values():
            child_process.terminate_tree(role, 30.0)
    assert set(codes.values()) == {0}, codes
    assert not run_problems(job.folder, updates, open_at_end=4)
    found = summary.read_summary(job.folder)
    assert [restart["role"] for restart in found["restarts"]] == ["trainer-1"]
    assert found["accounting"]["rolled_back"] == len(episodes.read_rolled_back(job.folder))
    assert {line["worker"] for line in episodes.read_lines(job.folder)} == {"rollout-0.1", "rollout-1.1"}
    assert not list(Path("/dev/shm").glob(f"webrl-{job.config.run.name}-*"))


def test_an_engine_that_spans_both_nodes_is_restarted_when_its_follower_is_killed(
    tmp_path: Path, tiny_model: Path
) -> None:
    updates, part = 6, "rollout-0.follower-1"
    job = NodeJob(tmp_path, tiny_model, engine_stages=2, updates=updates)
    try:
        job.start_nodes()
        job.until(lambda: len(summary.read_updates(job.folder)) >= 2, "updates")
        job.until(lambda: job.role(part), "the part").kill()
        for node in (0, 1):
            log = job.log(f"node-{node}-rollout")
            job.until(lambda: "; restarting rollout-0" in log.read_text(), "another start")  # noqa: B023
        codes = job.wait()
    finally:
        for role in job.roles.values():
            child_process.terminate_tree(role, 30.0)
    assert set(codes.values()) == {0}, codes
    assert not run_problems(job.folder, updates, open_at_end=4)
    found = summary.read_summary(job.folder)
    assert sorted(restart["role"] for restart in found["restarts"]) == ["rollout-0", part]
    assert f"engine 0 is dead: {part} on {socket.gethostname()} was restarted" in job.log("node-0-rollout").read_text()
    assert max(u["logprob_mismatch_max"] for u in found["updates"] if u["logprob_mismatch_max"] is not None) <= 1e-3
    assert {line["worker"] for line in episodes.read_lines(job.folder)} == {"rollout-0.1", "rollout-0.2"}
    assert not list(Path("/dev/shm").glob(f"webrl-{job.config.run.name}-*"))


def test_a_job_on_two_nodes_trains_on_the_groups_of_both(job: NodeJob) -> None:
    other_clock = ["unshare", "--time", "--fork", "--kill-child", "--monotonic=100000"]
    if not subprocess.run([*other_clock, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        job.clock_of_node_1 = other_clock
    job.start_all()
    codes = job.wait()
    assert set(codes.values()) == {0}, f"{codes}\n" + job.log("trainer-0").read_text()[-3000:]
    content = summary.read_summary(job.folder)
    assert content["outcome"] == "finished"
    assert [update["version"] for update in content["updates"]] == [1, 2]
    assert content["accounting"]["matches"], content["accounting"]
    gaps = [u["logprob_mismatch_max"] for u in content["updates"] if u["logprob_mismatch_max"] is not None]
    assert max(gaps) <= 1e-3

    lines = episodes.read_lines(job.folder)
    assert {line["worker"] for line in lines} == {"rollout-0.1", "rollout-1.1"}
    stored = [recorded_groups.read_groups_of_version(job.folder / "records", version) for version in (0, 1)]
    trained = {line["ticket"] for line in lines if line["disposition"] == episodes.TRAINED}
    assert {group.ticket for groups in stored for group in groups} >= trained
    assert all(
        bytes(image[:4]) == b"\x89PNG"
        for groups in stored
        for g in groups
        for t in g.trajectories
        for image in t.images
    )

    nodes = content["node_traffic"]
    assert nodes["images_mib"] > nodes["remote_images_mib"] >= 0
    assert nodes["local_fraction"] == pytest.approx(1 - nodes["remote_images_mib"] / nodes["images_mib"])
    assert nodes["other_mib"] > 0
    second = {"rollout-1", "trainer-1"}
    check_timeline(job.folder, {"rollout-0", "trainer-0", *second})
    index = EpisodeIndex(job.folder)
    index.refresh()
    assert {row["folder"] for row in index.search(EpisodeQuery({"disposition": ["trained"]}), limit=MAX_PAGE).rows} == {
        "rollout-0",
        "rollout-1",
    }
    assert not list(Path("/dev/shm").glob(f"webrl-{job.config.run.name}-*"))
