"""The processes that a node starts: commands, environments, core binding, supervision and their common end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.client import RELAY_VARIABLE, ControlClient
from megatron_webrl.launch import watchdog
from megatron_webrl.launch.roles import ProcessSpec, process_specs
from megatron_webrl.launch.run_folder import config_path, write_job
from megatron_webrl.launch.slurm.commands import node_number, own_listen_address, sessions_per_server
from megatron_webrl.launch.slurm.prepare import browser_server_overrides, prepare_job, resume_overrides
from megatron_webrl.launch.validation import load_config
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.rollout.engine.vllm_environment import engine_environment
from megatron_webrl.track import events
from megatron_webrl.track.run_lock import start_launch
from megatron_webrl.types import is_infrastructure_failure
from megatron_webrl.util.disk_faults import INFRASTRUCTURE_EXIT_CODE
from tests.failing_files import STALL, FailingFiles
from tests.job_control import connect, control_service
from tests.waiting import until

ROOT = Path(__file__).parents[3]
FOUR = str(ROOT / "configs" / "8b_4node.yaml")


def of(
    config: Config, node: int, role: str, inherited: dict[str, str] | None = None, stub_command: str = ""
) -> list[ProcessSpec]:
    return process_specs(config, place_processes(config), node, [role], "10.0.0.1", inherited or {}, stub_command)  # type: ignore[arg-type,list-item]


# -- what is to be started ----------------------------------------------------------------------------


def test_every_placed_process_is_started_once_with_its_placement() -> None:
    config = parse_config(FOUR)
    placement = place_processes(config)
    for node in range(4):
        here = {start.name: start for role in ("trainer", "rollout") for start in of(config, node, role)}
        assert list(here) == [process.name for process in placement.on_node(node)]
        for process in placement.on_node(node):
            start = here[process.name]
            assert start.command == (sys.executable, "-m", "megatron_webrl", "role", "runs/8b_4node", process.name)
            assert start.cores == process.cores
            assert start.environment["WEBRL_CORES"] == format_cores(process.cores)
            assert start.environment["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, process.devices))
            assert start.log == Path(f"runs/8b_4node/logs/node-{node}/{process.name}.log")
    ranks = [start.environment for start in of(config, 2, "trainer")]
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in ranks] == [(str(n + 8), str(n)) for n in range(4)]
    meeting = {(each["WORLD_SIZE"], each["MASTER_ADDR"], each["MASTER_PORT"]) for each in ranks}
    assert meeting == {("16", "10.0.0.1", "29501")}
    ports = [start.environment["MASTER_PORT"] for start in of(config, 2, "rollout")]
    assert ports == ["29505", "29506", "29507", "29508"]
    real, stubbed = (of(config, 1, "rollout", stub_command=command)[0] for command in ("", "python3 my.py --loud"))
    assert stubbed.command == ("python3", "my.py", "--loud", *real.command[3:])
    assert (stubbed.environment, stubbed.cores, stubbed.log) == (real.environment, real.cores, real.log)
    spanning = parse_config(ROOT / "configs" / "235b_a22b_32node.yaml")
    for node, name in ((2, "rollout-1"), (3, "rollout-1.follower-1")):
        (start,) = of(spanning, node, "rollout")
        assert (start.name, start.command[-1], start.environment["CUDA_VISIBLE_DEVICES"]) == (name, name, "4,5,6,7")


def test_network_cards_threads_and_time_limits_are_set_unless_they_are_inherited() -> None:
    cards = parse_config(FOUR, ["cluster.nics=[a,a,b,b,c,c,d,d]", "weights.timeout_seconds=12.5"])
    processes = [*of(cards, 0, "trainer"), *of(cards, 0, "rollout")]
    assert {process.environment["NCCL_IB_HCA"] for process in processes} == {"=a,b,c,d"}
    rank = of(cards, 0, "trainer")[1].environment
    assert (rank["OMP_NUM_THREADS"], rank["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("1", "32")
    for environment in (rank, engine_environment(cards)):
        assert environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "13"  # of the creation of a link's communicator
    own = {"NCCL_IB_HCA": "=all", "OMP_NUM_THREADS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert not of(cards, 0, "trainer", own)[1].environment.keys() & own.keys()
    assert "NCCL_IB_HCA" not in of(parse_config(FOUR), 0, "trainer")[0].environment


def test_a_node_takes_its_number_from_slurm_and_a_browser_server_the_address_of_its_machine() -> None:
    config, slurm = parse_config(FOUR), {"SLURM_NODEID": "3", "SLURM_STEP_NUM_NODES": "4"}
    assert node_number(None, config, slurm) == 3
    assert node_number(2, config, {}) == 2
    for number, environment, words in (
        (None, {}, "not in a Slurm step"),
        (None, slurm | {"SLURM_STEP_NUM_NODES": "5"}, "5 nodes, but cluster.nodes=4"),
        (4, {}, "--node=4 is not one of the 4 nodes"),
    ):
        with pytest.raises(ConfigError, match=words):
            node_number(number, config, environment)
    others = "http://192.0.2.1:8700"  # nobody's address
    own = own_listen_address((others, "http://127.0.0.1:8701"))
    assert (own.host, own.port) == ("127.0.0.1", 8701)
    with pytest.raises(ConfigError, match=f"--servers={others} has no address of this machine"):
        own_listen_address((others,))
    many = ["rollout.engines=3", "rollout.groups_in_flight=2", "rollout.group_size=4", "evaluation.every=5"]
    assert sessions_per_server(parse_config(None, many), 2) == 18  # of 36


# -- the folder of a job ------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path, tiny_model: Path) -> list[str]:
    sizes = ("max_model_len=1024", "max_new_tokens=16", "kv_cache_mib=32")
    return [
        f"run.directory={tmp_path}", "run.name=here", f"model.path={tiny_model}", "ring.capacity_mib=16",
        "tasks.environments=[click-test]", "browser.processes=2", "browser.width=320",
        *(f"rollout.{size}" for size in sizes),
    ]  # fmt: skip


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.yaml"
    path.write_text("{}\n")
    return path


def test_preparing_makes_a_folder_and_renames_an_earlier_one(tmp_path: Path, empty: Path, settings: list[str]) -> None:
    messages: list[str] = []
    servers = browser_server_overrides("http://head:8700")  # in place of the job's own browsers
    for more in ([], servers):
        path = prepare_job(parse_config(empty, [*settings, *more]), False, messages.append)
    assert path == tmp_path / "here" / "config.yaml"
    browser = load_config(path).browser
    assert (browser.servers, browser.processes, browser.width) == ("http://head:8700", 1, 320)
    placed = json.loads((tmp_path / "here" / "placement.json").read_text())
    assert [each["name"] for each in placed["processes"]] == ["trainer-0", "rollout-0"]
    assert (tmp_path / "here" / "logs" / "node-0").is_dir()
    assert messages == [f"renamed the earlier run of this name to {tmp_path / 'here.1'}"]
    with pytest.raises(ConfigError, match=r"model.path=/nowhere"):
        prepare_job(parse_config(empty, [*settings, "model.path=/nowhere"]), False, messages.append)
    assert not (tmp_path / "here.2").exists()


def test_a_requeued_job_resumes_from_its_checkpoint(empty: Path, settings: list[str]) -> None:
    first, again = ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": count} for count in "01")
    folder = prepare_job(parse_config(empty, settings), False, print, first).parent
    assert resume_overrides(str(empty), settings, again) == []
    (folder / "checkpoints" / "version-000001").mkdir(parents=True)
    (folder / "checkpoints" / "version-000001" / "state.json").write_text("{}")
    (folder / "checkpoints" / "latest").write_text("version-000001\n")
    assert resume_overrides(str(empty), settings, first) == []
    added = resume_overrides(str(empty), settings, again)
    assert load_config(prepare_job(parse_config(empty, [*settings, *added]), False, print, again)).run.resume
    assert (folder / "checkpoints" / "latest").is_file()


# -- on this machine ----------------------------------------------------------------------------------

ROLE = """
import os, sys, time
print(sorted(os.sched_getaffinity(0)), os.environ["WEBRL_ROLE"], os.environ["TMPDIR"], flush=True)
if os.environ["WEBRL_ROLE"] == os.environ.get("FAILS"):
    sys.exit("ERROR it fails on purpose")
time.sleep(2 if "FAILS" in os.environ else 600)
"""
"""A role that says what it may use, and then waits for the end of the job, or fails, or ends after another."""


@dataclass
class Here:
    """Node 0 of a job, and its control service."""

    folder: Path
    address: Path

    def start_step(self, role: str, *more: str, **environment: str) -> subprocess.Popen[str]:
        path = prepare(self.folder, *more)
        (self.folder / "role.py").write_text(ROLE)
        command = [sys.executable, "-m", "megatron_webrl", "node", role, str(path), "--node", "0"]
        command += ["--stub-command", f"{sys.executable} {self.folder / 'role.py'}"]
        return subprocess.Popen(
            command, env={**os.environ, **environment}, cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def log(self, name: str) -> str:
        path = self.folder / "here" / "logs" / "node-0" / f"{name}.log"
        return path.read_text() if path.is_file() else ""

    def started(self, step: subprocess.Popen[str], name: str, lives: int = 1) -> psutil.Process:
        """The process of a role, which has said what it may use."""
        until(lambda: self.log(name).count(f"] {name} ") >= lives, f"a line of {name}")
        (child,) = psutil.Process(step.pid).children()
        return child

    def outcome(self) -> str:
        return (connect(self.address, "test").job_end() or {}).get("outcome", "")

    def events(self) -> list[tuple[str, str]]:
        return [(each.role, each.event) for each in events.read_events(self.folder / "here")]


def prepare(folder: Path, *settings: str) -> Path:
    """Write the files of a job; returns its config.yaml."""
    config = parse_config(None, [f"run.directory={folder}", "run.name=here", *settings])
    config.run_folder.mkdir(exist_ok=True)
    write_job(config, place_processes(config))
    return config_path(config)


@contextmanager
def job(folder: Path) -> Iterator[Here]:
    (folder / "here").mkdir()
    with control_service(folder / "here") as address:
        yield Here(folder, address)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_processes_are_bound_to_their_cores_die_with_their_node_and_use_its_relay(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    cores = f'cluster.numa_cores=["{first},{second}"]'
    with job(tmp_path) as here:
        step = here.start_step("trainer", cores)
        child = here.started(step, "trainer-0")
        assert here.log("trainer-0").startswith(f"[{first}] trainer-0 ")
        step.kill()
        step.wait(10)
        child.wait(10)
        step = here.start_step("rollout", cores)
        here.started(step, "rollout-0")
        step.send_signal(signal.SIGUSR1)  # a notice, which ends no node
        watchdog.request_stack_dump(tmp_path / "here", "a test", {"rollout-0": ("heartbeat", "")})
        child = here.started(step, "rollout-0", lives=2)
        control = ControlClient(here.address, "rollout-0", relay_port=int(child.environ()[RELAY_VARIABLE]))
        control.start_heartbeat()
        until(lambda: control._facts.relay_answers > 0, "an answer of the relay")
        until(lambda: "rollout-0" in control.role_reports(), "the heartbeat at the control service")
        control.close()
        step.send_signal(signal.SIGTERM)
        output, _ = step.communicate(timeout=30)
    assert here.log("rollout-0").startswith(f"[{second}] rollout-0 ")
    assert step.returncode == 128 + signal.SIGTERM
    assert "restarting rollout-0 (restart 1 of 6 within an hour)" in output
    assert "ended by SIGTERM" in output
    assert not Path(here.log("rollout-0").split()[-1]).exists()  # the folder of temporary files


def test_a_rank_that_fails_too_often_ends_the_job_with_its_name(tmp_path: Path) -> None:
    why = "trainer-1 exited with code 1; last log line: ERROR it fails on purpose"
    with job(tmp_path) as here:
        more = "trainer.data_parallel=2", "run.max_trainer_restarts=1"
        step = here.start_step("trainer", *more, FAILS="trainer-1")
        output, _ = step.communicate(timeout=90)
        outcome = here.outcome()
    assert step.returncode == 1
    often = "the trainer failed 2 times in a row without a new checkpoint (run.max_trainer_restarts=1); the last time: "
    assert outcome.startswith(f"failed: {often}{why}")
    assert why in output
    assert here.log("trainer-1").count("ERROR it fails") == 2
    happened = [each for each in here.events() if each[1] != events.STARTED]
    assert happened == [("trainer-1", events.RESTARTED), ("trainer-1", events.FAILED)]
    assert "restarting all trainer ranks from the beginning" in output


def test_a_job_is_stopped_cleanly_or_as_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prepare(tmp_path)
    assert main(["node", "stop", str(path)]) == 1
    assert "the control service did not start within 1 s" in capsys.readouterr().err
    with control_service(path.parent) as address:
        control = connect(address, "test")
        assert not control.stop_requested()
        assert main(["node", "stop", str(path)]) == 0
        assert control.stop_requested()
        assert control.job_end() is None
        assert main(["node", "stop", str(path), "--failed", "n3 is on fire"]) == 0
        assert (control.job_end() or {})["outcome"] == "failed: n3 is on fire"


HOST = """
import sys
from megatron_webrl import cli
from megatron_webrl.control import server
from megatron_webrl.util import disk_faults
disk_faults.TOUCH_SECONDS, disk_faults.STALL_SECONDS, server.LINGER_SECONDS = 0.1, 2.0, 1.0
sys.exit(cli.main(["node", "control", sys.argv[1], "--host", "127.0.0.1"]))
"""


def test_a_file_system_that_stalls_too_long_ends_the_job_to_be_requeued(tmp_path: Path, tiny_model: Path) -> None:
    slurm = {"SLURM_JOB_ID": "17"}
    with start_launch(tmp_path / "here", slurm):
        pass
    port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    path = prepare(tmp_path, f"model.path={tiny_model}", f"cluster.base_port={port}")
    disk = FailingFiles(path.parent, tmp_path)
    command = [sys.executable, "-c", HOST, str(path)]
    with (tmp_path / "log").open("wb") as log:
        host = subprocess.Popen(command, env={**os.environ, **slurm, **disk.environment}, stdout=log, stderr=log)
    try:
        until(lambda: "control service at" in (tmp_path / "log").read_text(), "the control service", 120)
        client = ControlClient(path.with_name("control.json"), "reader")
        with disk.failing(STALL):
            until(client.job_end, "the end, while the host's main thread waits for the disk", 120)
            end = client.job_end()
            assert host.wait(120) == INFRASTRUCTURE_EXIT_CODE
    finally:
        host.kill()
        host.wait()
    assert end is not None
    assert is_infrastructure_failure(end["outcome"])
    assert f"the file system of {path.parent} has stalled for 2 s; the job ends" in (tmp_path / "log").read_text()
