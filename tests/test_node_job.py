"""A whole job on two nodes, which are this machine twice: that of test_slurm.py without Slurm, its files looked at."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_webrl import processes
from megatron_webrl.config import load, save
from megatron_webrl.tracking import episode_log
from megatron_webrl.trainer import group_files
from tests.tiny_settings import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]

LIMIT = 700.0


class NodeJob:
    """Control plane, a worker and a trainer rank on each of two nodes."""

    def __init__(self, folder: Path, model: Path) -> None:
        name = f"n{os.getpid()}"
        settings: dict[str, Any] = {**SETTINGS, "model": {"path": str(model)}}
        settings["run"] = {"name": name, "directory": str(folder / "runs")}
        settings["trainer"] = {**SETTINGS["trainer"], "data_parallel": 2}
        settings["rollout"] = {**SETTINGS["rollout"], "engines": 2}
        settings["cluster"], settings["tracking"] = {"nodes": 2}, {"keep_records": True}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        self.config = load(folder / "config.yaml")
        self.folder = self.config.run_folder
        (self.folder / "logs").mkdir(parents=True)
        save(self.config, self.folder / "config.yaml")
        self.roles: dict[str, Any] = {}

    def start(self, name: str, *words: str, **environment: str) -> None:
        command = [sys.executable, "-m", "megatron_webrl.cli", *words, "--config", str(self.folder / "config.yaml")]
        full = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        full.pop("MLFLOW_TRACKING_URI", None)
        self.roles[name] = processes.start(command, self.log(name), full, name)

    def start_all(self) -> None:
        address = self.folder / "control.json"
        self.start("control", "control", "--address-file", str(address))
        deadline = time.monotonic() + 120
        while not address.is_file():
            assert time.monotonic() < deadline, self.log("control").read_text()
            time.sleep(0.05)
        fields = json.loads(address.read_text())
        for node in ("0", "1"):
            where = ("--control", f"{fields['host']}:{fields['port']}", "--node", node)
            self.start(f"rollout-{node}", "rollout", *where, "--worker", node)
            place = {"RANK": node, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
            self.start(f"trainer-{node}", "trainer", *where, **place)

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
        processes.kill_group(role.pid)


def test_a_job_on_two_nodes_trains_on_the_groups_of_both(job: NodeJob) -> None:
    job.start_all()
    codes = job.wait()
    assert set(codes.values()) == {0}, f"{codes}\n" + job.log("trainer-0").read_text()[-3000:]
    summary = json.loads((job.folder / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    assert [update["version"] for update in summary["updates"]] == [1, 2]
    assert summary["accounting"]["matches"], summary["accounting"]
    gaps = [u["logprob_gap_max"] for u in summary["updates"] if u["logprob_gap_max"] is not None]
    assert max(gaps) <= 1e-3

    lines = episode_log.read(job.folder)
    assert {line["worker"] for line in lines} == {"rollout-0.1", "rollout-1.1"}
    stored = [group_files.read_version(job.folder / "records", version) for version in (0, 1)]
    trained = {line["ticket"] for line in lines if line["fate"] == episode_log.TRAINED}
    assert {group.ticket for groups in stored for group in groups} >= trained
    assert all(
        bytes(image[:4]) == b"\x89PNG"
        for groups in stored
        for g in groups
        for t in g.trajectories
        for image in t.images
    )

    nodes = summary["nodes"]
    assert nodes["screenshots_mib"] > nodes["moved_mib"] >= 0
    assert nodes["local_share"] == pytest.approx(1 - nodes["moved_mib"] / nodes["screenshots_mib"])
    assert nodes["other_mib"] > 0
    pages = list((job.folder / "trajectories").glob("*.html"))
    assert pages
    assert all("data:image/png;base64," in page.read_text() for page in pages)
    assert not list(Path("/dev/shm").glob(f"webrl-{job.config.run.name}-*"))
