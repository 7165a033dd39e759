"""The processes that a node starts: commands, environments, core binding, supervision and their common end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.client import RELAY_VARIABLE, ControlClient
from megatron_webrl.control.connection import ControlAddress
from megatron_webrl.launch import watchdog
from megatron_webrl.launch.roles import ProcessSpec, process_specs
from megatron_webrl.launch.run_folder import config_path, control_address_path, write_job
from megatron_webrl.launch.slurm.commands import node_number, own_listen_address, sessions_per_server
from megatron_webrl.launch.slurm.prepare import browser_server_overrides, prepare_job, resume_overrides
from megatron_webrl.launch.validation import load_config
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.rollout.engine.vllm_environment import engine_environment
from megatron_webrl.track import events
from tests.job_control import connect, control_service
from tests.waiting import until

ROOT = Path(__file__).parents[3]
FOUR = str(ROOT / "configs" / "8b_4node.yaml")
FIRST_HOST = "10.0.0.1"


def of(
    config: Config, node: int, role: str, inherited: dict[str, str] | None = None, stub_command: str = ""
) -> list[ProcessSpec]:
    return process_specs(config, place_processes(config), node, [role], FIRST_HOST, inherited or {}, stub_command)  # type: ignore[arg-type]


# -- pure ---------------------------------------------------------------------------------------------


def test_every_placed_process_is_started_once_with_its_placement() -> None:
    config = parse_config(FOUR)
    placement = place_processes(config)
    for node in range(4):
        here = {start.name: start for role in ("trainer", "rollout") for start in of(config, node, role)}
        assert list(here) == [process.name for process in placement.on_node(node)]
        for process in placement.on_node(node):
            start = here[process.name]
            program = (sys.executable, "-m", "megatron_webrl")
            assert start.command == (*program, "role", "runs/8b_4node", process.name)
            assert start.cores == process.cores
            assert start.environment["WEBRL_CORES"] == format_cores(process.cores)
            assert start.environment["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, process.devices))
            assert start.log == Path(f"runs/8b_4node/logs/node-{node}/{process.name}.log")


def test_a_rank_gets_its_rank_numbers_and_the_master_address() -> None:
    ranks = of(parse_config(FOUR), 2, "trainer")
    assert [start.environment["RANK"] for start in ranks] == ["8", "9", "10", "11"]
    assert [start.environment["LOCAL_RANK"] for start in ranks] == ["0", "1", "2", "3"]
    for start in ranks:
        assert start.environment["WORLD_SIZE"] == "16"
        assert (start.environment["MASTER_ADDR"], start.environment["MASTER_PORT"]) == ("10.0.0.1", "29501")
    ports = [start.environment["MASTER_PORT"] for start in of(parse_config(FOUR), 2, "rollout")]
    assert ports == ["29505", "29506", "29507", "29508"]


def test_inherited_settings_of_threads_and_network_cards_are_kept() -> None:
    cards = parse_config(FOUR, ["cluster.nics=[a,a,b,b,c,c,d,d]"])
    processes = [*of(cards, 0, "trainer"), *of(cards, 0, "rollout")]
    assert {process.environment["NCCL_IB_HCA"] for process in processes} == {"=a,b,c,d"}
    assert of(cards, 0, "trainer")[1].environment["OMP_NUM_THREADS"] == "1"
    assert of(cards, 0, "trainer")[1].environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    own = {"NCCL_IB_HCA": "=all", "OMP_NUM_THREADS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert not of(cards, 0, "trainer", own)[1].environment.keys() & own.keys()
    assert "NCCL_IB_HCA" not in of(parse_config(FOUR), 0, "trainer")[0].environment


def test_the_limit_of_a_link_holds_for_the_creation_of_its_communicator() -> None:
    config = parse_config(FOUR, ["weights.timeout_seconds=12.5"])
    assert of(config, 0, "trainer")[0].environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "13"
    assert engine_environment(config)["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "13"


def test_a_stub_command_replaces_the_program_and_nothing_else() -> None:
    real, stubbed = (
        of(parse_config(FOUR), 1, "rollout", stub_command=command)[0] for command in ("", "python3 my.py --loud")
    )
    assert stubbed.command[:3] == ("python3", "my.py", "--loud")
    assert stubbed.command[3:] == real.command[3:]
    assert (stubbed.environment, stubbed.cores, stubbed.log) == (real.environment, real.cores, real.log)


def test_an_engine_that_spans_nodes_has_its_worker_on_the_first_and_a_follower_on_the_other() -> None:
    config = parse_config(ROOT / "configs" / "235b_a22b_32node.yaml")
    for node, name in ((2, "rollout-1"), (3, "rollout-1.follower-1")):
        (start,) = of(config, node, "rollout")
        assert start.name == start.command[-1] == name
        assert start.environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_a_node_takes_its_number_from_slurm_and_checks_it() -> None:
    config = parse_config(FOUR)
    slurm = {"SLURM_NODEID": "3", "SLURM_STEP_NUM_NODES": "4"}
    assert node_number(None, config, slurm) == 3
    assert node_number(2, config, {}) == 2
    with pytest.raises(ConfigError, match=r"not in a Slurm step"):
        node_number(None, config, {})
    with pytest.raises(ConfigError, match=r"the step has 5 nodes, but cluster.nodes=4"):
        node_number(None, config, slurm | {"SLURM_STEP_NUM_NODES": "5"})
    with pytest.raises(ConfigError, match=r"--node=4 is not one of the 4 nodes"):
        node_number(4, config, {})


def test_browser_servers_are_enough_for_all_workers() -> None:
    many = ["rollout.engines=3", "rollout.groups_in_flight=2", "rollout.group_size=4"]
    config = parse_config(None, [*many, "evaluation.every=5"])
    assert sessions_per_server(config, 2) == 18  # of 36


def test_a_browser_server_listens_at_the_address_of_its_machine() -> None:
    others = "http://192.0.2.1:8700"  # nobody's address
    own = own_listen_address((others, "http://127.0.0.1:8701"))
    assert (own.host, own.port) == ("127.0.0.1", 8701)
    with pytest.raises(ConfigError, match=f"--servers={others} has no address of this machine"):
        own_listen_address((others,))


# -- on this machine ----------------------------------------------------------------------------------


def settings(tmp_path: Path, model: Path, *more: str) -> list[str]:
    sizes = [
        "rollout.max_model_len=1024",
        "rollout.max_new_tokens=16",
        "rollout.kv_cache_mib=32",
        "ring.capacity_mib=16",
    ]
    return [f"run.directory={tmp_path}", "run.name=here", f"model.path={model}", *sizes, *more]


def test_preparing_makes_the_folder_and_renames_the_earlier_one(tmp_path: Path, tiny_model: Path) -> None:
    messages: list[str] = []
    empty = tmp_path / "empty.yaml"
    empty.write_text("{}\n")
    more = settings(tmp_path, tiny_model, "tasks.environments=[click-test]")
    for _ in range(2):
        path = prepare_job(parse_config(empty, more), False, messages.append)
    assert path == tmp_path / "here" / "config.yaml"
    assert load_config(path).model.path == str(tiny_model)
    placed = json.loads((tmp_path / "here" / "placement.json").read_text())
    assert [each["name"] for each in placed["processes"]] == ["trainer-0", "rollout-0"]
    assert (tmp_path / "here" / "logs" / "node-0").is_dir()
    assert messages == [f"renamed the earlier run of this name to {tmp_path / 'here.1'}"]
    with pytest.raises(ConfigError, match=r"model.path=/nowhere"):
        prepare_job(parse_config(empty, [*more, "model.path=/nowhere"]), False, messages.append)
    assert not (tmp_path / "here.2").exists()


def test_a_requeued_job_resumes_from_its_checkpoint(tmp_path: Path, tiny_model: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("{}\n")
    more = settings(tmp_path, tiny_model, "tasks.environments=[click-test]")
    first, again = ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": count} for count in "01")
    folder = prepare_job(parse_config(empty, more), False, print, first).parent
    assert resume_overrides(str(empty), more, again) == []
    (folder / "checkpoints" / "version-000001").mkdir(parents=True)
    (folder / "checkpoints" / "version-000001" / "state.json").write_text("{}")
    (folder / "checkpoints" / "latest").write_text("version-000001\n")
    assert resume_overrides(str(empty), more, first) == []
    added = resume_overrides(str(empty), more, again)
    assert load_config(prepare_job(parse_config(empty, [*more, *added]), False, print, again)).run.resume
    assert (folder / "checkpoints" / "latest").is_file()


def test_browser_servers_replace_the_jobs_own_browsers(tmp_path: Path, tiny_model: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("{}\n")
    more = settings(tmp_path, tiny_model, "tasks.environments=[click-test]", "browser.processes=2", "browser.width=320")
    path = prepare_job(parse_config(empty, [*more, *browser_server_overrides("http://head:8700")]), False, print)
    browser = load_config(path).browser
    assert (browser.servers, browser.processes, browser.width) == ("http://head:8700", 1, 320)


# A role that says what it may use, and then waits for the end of the job, or fails.
ROLE = """
import os, sys, time
print(sorted(os.sched_getaffinity(0)), os.environ["WEBRL_ROLE"], os.environ["TMPDIR"], flush=True)
if os.environ["WEBRL_ROLE"] == os.environ.get("FAILS"):
    sys.exit("ERROR it fails on purpose")
time.sleep(600)
"""


def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def start_step(address: Path, role: str, *more: str, **environment: str) -> subprocess.Popen[str]:
    tmp_path = address.parents[1]
    config = parse_config(None, [f"run.directory={tmp_path}", "run.name=here", *more])
    write_job(config, place_processes(config))
    program = tmp_path / "role.py"
    program.write_text(ROLE)
    command = [
        sys.executable,
        "-m",
        "megatron_webrl",
        "node",
        role,
        str(config_path(config)),
        "--node",
        "0",
    ]
    command += ["--stub-command", f"{sys.executable} {program}"]
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def await_logs(tmp_path: Path, names: list[str]) -> list[str]:
    paths = [tmp_path / "here" / "logs" / "node-0" / f"{name}.log" for name in names]
    deadline = time.monotonic() + 60
    while not all(path.is_file() and path.read_text().count("\n") for path in paths):
        assert time.monotonic() < deadline, f"no logs of {names}"
        time.sleep(0.05)
    return [path.read_text() for path in paths]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_processes_are_bound_to_their_cores_and_die_with_their_node(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    cores = f'cluster.numa_cores=["{first},{second}"]'
    with control_service(run_folder(tmp_path)) as address:
        step = start_step(address, "trainer", cores)
        (said,) = await_logs(tmp_path, ["trainer-0"])
        assert said.startswith(f"[{first}] trainer-0 ")
        (child,) = psutil.Process(step.pid).children()
        step.kill()
        step.wait(10)
        child.wait(10)
        step = start_step(address, "rollout", cores)
        (said,) = await_logs(tmp_path, ["rollout-0"])
        assert said.startswith(f"[{second}] rollout-0 ")
        scratch = Path(said.split()[-1])
        step.send_signal(signal.SIGTERM)
        output, _ = step.communicate(timeout=30)
    assert step.returncode == 128 + signal.SIGTERM
    assert "started rollout-0" in output
    assert "ended by SIGTERM" in output
    assert not scratch.exists()


@pytest.mark.parametrize("times", [0, 1])
def test_a_rank_that_fails_too_often_ends_the_job_with_its_name(tmp_path: Path, times: int) -> None:
    why = "trainer-1 exited with code 1; last log line: ERROR it fails on purpose"
    with control_service(run_folder(tmp_path)) as address:
        more = "trainer.data_parallel=2", f"run.max_trainer_restarts={times}"
        step = start_step(address, "trainer", *more, FAILS="trainer-1")
        output, _ = step.communicate(timeout=90)
        end = connect(address, "test").job_end()
    assert step.returncode == 1
    assert end is not None
    often = "the trainer failed 2 times in a row without a new checkpoint (run.max_trainer_restarts=1); the last time: "
    assert end["outcome"].startswith(f"failed: {often * times}{why}")
    assert why in output
    log = (tmp_path / "here" / "logs" / "node-0" / "trainer-1.log").read_text()
    assert log.count("ERROR it fails") == 1 + times
    happened = [
        (each.role, each.event) for each in events.read_events(tmp_path / "here") if each.event != events.STARTED
    ]
    assert happened == [("trainer-1", events.RESTARTED)] * times + [("trainer-1", events.FAILED)]
    assert ("restarting all trainer ranks from the beginning" in output) == bool(times)


def test_the_roles_of_a_node_exchange_through_its_relay(tmp_path: Path) -> None:
    with control_service(run_folder(tmp_path)) as address:
        step = start_step(address, "rollout")
        await_logs(tmp_path, ["rollout-0"])
        (child,) = psutil.Process(step.pid).children()
        control = ControlClient(address, "rollout-0", relay_port=int(child.environ()[RELAY_VARIABLE]))
        control.start_heartbeat()
        until(lambda: control._facts.relay_answers > 0, "an answer of the relay")
        until(lambda: "rollout-0" in control.role_reports(), "the heartbeat at the control service")
        control.close()
        step.terminate()
        step.communicate(timeout=30)


def test_a_killed_worker_is_restarted(tmp_path: Path) -> None:
    with control_service(run_folder(tmp_path)) as address:
        step = start_step(address, "rollout", "run.worker_restarts_per_hour=1")
        await_logs(tmp_path, ["rollout-0"])
        (child,) = psutil.Process(step.pid).children()
        child.kill()
        deadline = time.monotonic() + 60
        while (tmp_path / "here" / "logs" / "node-0" / "rollout-0.log").read_text().count("\n") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (child,) = psutil.Process(step.pid).children()
        child.kill()
        output, _ = step.communicate(timeout=60)
        end = connect(address, "test").job_end()
    assert "rollout-0 killed by SIGKILL" in output
    assert "restarting rollout-0 (restart 1 of 1 within an hour)" in output
    assert end is not None
    assert end["outcome"].startswith("failed: rollout-0 killed by SIGKILL")
    happened = events.read_events(tmp_path / "here")
    assert [(event.role, event.event, event.node) for event in happened] == [
        ("rollout-0", "started", 0), ("rollout-0", "restarted", 0), ("rollout-0", "failed", 0),
    ]  # fmt: skip
    assert all(event.log == "logs/node-0/rollout-0.log" for event in happened)
    assert all("killed by SIGKILL" in event.reason for event in happened[1:])


def test_a_notice_ends_no_node_and_a_kill_request_kills_its_target(tmp_path: Path) -> None:
    with control_service(run_folder(tmp_path)) as address:
        step = start_step(address, "rollout", "run.worker_restarts_per_hour=1")
        await_logs(tmp_path, ["rollout-0"])
        step.send_signal(signal.SIGUSR1)
        watchdog.request_stack_dump(tmp_path / "here", "it is a test", {"rollout-0": ("heartbeat", "")})
        log = tmp_path / "here" / "logs" / "node-0" / "rollout-0.log"
        deadline = time.monotonic() + 120
        while log.read_text().count("] rollout-0 ") < 2:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        step.send_signal(signal.SIGTERM)
        output, _ = step.communicate(timeout=60)
    assert "does not show its stacks yet" in output  # the program has no handler, and lived on
    assert "rollout-0 killed by SIGKILL; last log line: ERROR killing rollout-0: it is a test" in output
    assert "restarting rollout-0 (restart 1 of 1 within an hour)" in output
    assert step.returncode == 128 + signal.SIGTERM


def test_missing_cores_are_refused(tmp_path: Path) -> None:
    config = parse_config(None, [f"run.directory={tmp_path}", "run.name=here", 'cluster.numa_cores=["5000-5009"]'])
    config.run_folder.mkdir()
    write_job(config, place_processes(config))
    ControlAddress("127.0.0.1", 1, 1, "job", "token").write(control_address_path(config))
    command = [sys.executable, "-m", "megatron_webrl", "node", "trainer", str(config_path(config))]
    done = subprocess.run(
        [*command, "--node", "0"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "cluster.numa_cores names core 5000, but the step may use" in done.stderr


def test_a_job_is_stopped_cleanly_or_as_failed(tmp_path: Path) -> None:
    config = parse_config(None, [f"run.directory={tmp_path}", "run.name=here"])
    config.run_folder.mkdir()
    write_job(config, place_processes(config))
    command = [sys.executable, "-m", "megatron_webrl", "node", "stop", str(config_path(config))]
    early = subprocess.run(command, cwd=ROOT, timeout=60, check=False, stderr=subprocess.PIPE, text=True)
    assert (early.returncode, early.stderr) == (1, "webrl node stop: the control service did not start within 1 s\n")
    with control_service(config.run_folder) as address:
        control = connect(address, "test")
        assert not control.stop_requested()
        subprocess.run(command, cwd=ROOT, timeout=60, check=True)
        assert control.stop_requested()
        assert control.job_end() is None
        subprocess.run([*command, "--failed", "n3 is on fire"], cwd=ROOT, timeout=60, check=True)
        assert (control.job_end() or {})["outcome"] == "failed: n3 is on fire"
