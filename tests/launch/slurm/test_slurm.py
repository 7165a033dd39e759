"""Jobs on a real Slurm of virtual nodes: sbatch of the scripts in launch/slurm/."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megatron_webrl.browser.chromium import find_chromium
from megatron_webrl.config.load import parse_config
from megatron_webrl.monitor.episode_index import MAX_PAGE, EpisodeIndex, EpisodeQuery
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.track import episodes, events, summary
from tests.finished_runs import run_problems
from tests.launch.slurm.slurm_jobs import PAYLOAD, ROOT, SCRIPTS, leftovers_on, log, overrides, rings, submit
from tests.launch.slurm.virtual_nodes import address
from tests.launch.slurm.virtual_slurm import Cluster, free_ports, virtual_slurm, why_not
from tests.monitor.finished_jobs import check_timeline
from tests.tiny_settings import SETTINGS
from tests.waiting import until, write_program
from tools.bench import recorded_groups

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
apart_only = pytest.mark.skipif(bool(why_not(namespaces=True)), reason=why_not(namespaces=True) or "-")


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with virtual_slurm(4, gpus=8, cores=112) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, each with a name, an address, memory, process numbers and a clock of its own."""
    with virtual_slurm(2, namespaces=True, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster


# -- training -----------------------------------------------------------------------------------------


@apart_only
@pytest.mark.timeout(900)
def test_a_job_trains_over_two_nodes_on_the_groups_of_both(apart: Cluster, tmp_path: Path, tiny_model: Path) -> None:
    """Only a whole job shows that ranks, engines and rings of separate machines find each other."""
    name, updates = f"two{os.getpid()}", 3
    settings = {**SETTINGS, "model": {"path": str(tiny_model)}, "tracking": {"keep_records": True, "timeline": True}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    job = submit(
        apart, tmp_path, "train_cpu.sh", *overrides(tmp_path, name), f"trainer.updates={updates}",
        options=("--nodes=2",), CONFIG=str(tmp_path / "config.yaml"), MLFLOW_TRACKING_URI="", PREFLIGHT="0",
    )  # fmt: skip
    until(lambda: f"job: update 1 of {updates}" in log(tmp_path), lambda: f"an update: {log(tmp_path)}", 400)
    first, second = (rings(name, apart.path(node, "/dev/shm")) for node in ("n1", "n2"))
    assert len(first) == len(second) == 1
    assert first[0].name != second[0].name
    assert apart.wait(job, 400) == "COMPLETED", log(tmp_path)
    until(lambda: not leftovers_on(apart, "n1") + leftovers_on(apart, "n2"), "all to go", 30)
    assert f"job: control service at {address(1)}:" in log(tmp_path)

    run = tmp_path / name
    assert run_problems(run, updates, open_at_end=4) == []
    started = {event.role: event for event in events.read_events(run) if event.event == events.STARTED}
    assert (started["rollout-1"].node, started["rollout-1"].host, started["rollout-1"].slurm_job_id) == (1, "n2", job)
    found = summary.read_summary(run)
    assert max(update["logprob_mismatch_max"] or 0.0 for update in found["updates"]) <= 1e-3
    nodes = found["node_traffic"]
    assert nodes["images_mib"] > nodes["remote_images_mib"] >= 0
    assert nodes["local_fraction"] == pytest.approx(1 - nodes["remote_images_mib"] / nodes["images_mib"])
    lines = episodes.read_lines(run)
    assert {line["worker"] for line in lines} == {"rollout-0.1", "rollout-1.1"}
    groups = [group for n in range(updates) for group in recorded_groups.read_groups_of_version(run / "records", n)]
    assert {group.ticket for group in groups} >= {
        line["ticket"] for line in lines if line["disposition"] == episodes.TRAINED
    }
    images = [image for group in groups for trajectory in group.trajectories for image in trajectory.images]
    assert {bytes(image[:4]) for image in images} == {b"\x89PNG"}
    check_timeline(run, {"rollout-0", "rollout-1", "trainer-0", "trainer-1"})
    index = EpisodeIndex(run)
    index.refresh()
    rows = index.search(EpisodeQuery({"disposition": ["trained"]}), limit=MAX_PAGE).rows
    assert {row["folder"] for row in rows} == {"rollout-0", "rollout-1"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_trains_with_browsers_on_nodes_of_their_own(four: Cluster, tmp_path: Path, tiny_model: Path) -> None:
    name, path = f"split{os.getpid()}", tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, "model": {"path": str(tiny_model)}}))
    cpu = ("--nodes=1", "--gpus-per-node=0")
    job = four.submit(
        f"--chdir={ROOT}", f"--output={tmp_path}/job.log", *cpu, ":", *cpu, str(SCRIPTS / "train_split.sh"),
        *overrides(tmp_path, name), "trainer.updates=1", PYTHON=sys.executable, SLURM_SUBMIT_DIR=str(ROOT),
        CONFIG=str(path), MLFLOW_TRACKING_URI="", PREFLIGHT="0", BROWSER_SERVER_PORT=str(free_ports(1)),
    )  # fmt: skip
    assert four.wait(job, 500) == "COMPLETED", log(tmp_path)
    found = summary.read_summary(tmp_path / name)
    assert (found["outcome"], len(found["updates"]), found["accounting"]["matches"]) == ("finished", 1, True)
    assert "job: browsers on 1 nodes" in log(tmp_path)
    assert not list((tmp_path / name / "logs").glob("*browsers*"))  # of own nodes


# -- checks -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_nodes_are_checked_with_each_other_and_reported(four: Cluster, tmp_path: Path) -> None:
    job = submit(
        four, tmp_path, "gpu_check.sh", *overrides(tmp_path, "checked"), options=("--nodes=2", "--gpus-per-node=0"),
        CONFIG="configs/quickstart.yaml", GPU_CHECK_OPTIONS="--section nodes",
    )  # fmt: skip
    assert four.wait(job, 400) == "COMPLETED", log(tmp_path)
    report = json.loads((tmp_path / f"gpu-check-{job}" / "gpu-check.json").read_text())
    assert {(each["section"], each["status"]) for each in report["results"]} == {("nodes", "passed")}
    found = {each["name"]: each for each in report["results"]}
    assert found["n1: link n2"]["value"] > 0
    assert found["n2: link n1"]["unit"] == "GiB/s"


@apart_only
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_gpu_check_runs_its_job_as_two_steps_on_both_nodes_and_kills_a_rank(
    apart: Cluster, tmp_path: Path, tiny_model: Path
) -> None:
    """Slurm's steps start the job as any other one; the report is that of the section on one machine."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, "model": {"path": str(tiny_model)}}))
    job = submit(
        apart, tmp_path, "gpu_check.sh", *overrides(tmp_path, "ignored"),
        "cluster.nodes=2", "trainer.data_parallel=2", "rollout.engines=2", "ring.capacity_mib=128",
        options=("--nodes=2", "--gpus-per-node=0"), CONFIG=str(tmp_path / "config.yaml"), MLFLOW_TRACKING_URI="",
        GPU_CHECK_OPTIONS="--platform cpu --section nodes --section job",
    )  # fmt: skip
    assert apart.wait(job, 1000) == "COMPLETED", log(tmp_path)
    report = json.loads((tmp_path / f"gpu-check-{job}" / "gpu-check.json").read_text())
    found = {each["name"]: each for each in report["results"]}
    assert {each["section"] for each in report["results"]} == {"nodes", "job"}
    assert {each["status"] for each in report["results"]} == {"passed"}
    assert found["restarts after trainer-1 was killed"]["value"] == found["starts from a checkpoint"]["value"] == 1
    assert log(tmp_path).strip().splitlines()[-1] == report["meaning"]
    assert "started trainer-1" in log(tmp_path)
    started = {event.role: event for event in events.read_events(tmp_path / f"gpu-check-{job}-check")}
    assert {role: started[role].host for role in ("trainer-1", "rollout-1")} == {"trainer-1": "n2", "rollout-1": "n2"}


@pytest.mark.slow
def test_a_gpu_check_whose_job_cannot_start_says_so_in_its_report(four: Cluster, tmp_path: Path) -> None:
    job = submit(
        four, tmp_path, "gpu_check.sh", *overrides(tmp_path, "ignored"),
        "cluster.nodes=2", "trainer.data_parallel=2", "rollout.engines=2", options=("--nodes=1", "--gpus-per-node=0"),
        CONFIG="configs/quickstart.yaml", MLFLOW_TRACKING_URI="", GPU_CHECK_OPTIONS="--platform cpu --section job",
    )  # fmt: skip
    assert four.wait(job, 400) == "FAILED", log(tmp_path)
    report = json.loads((tmp_path / f"gpu-check-{job}" / "gpu-check.json").read_text())
    assert "job: a whole job" in report["summary"]
    assert "cluster.nodes=2, but the job has 1 nodes" in log(tmp_path)


@pytest.mark.slow
def test_a_job_excludes_a_bad_node(tmp_path: Path) -> None:
    """No browser starts on n2. With a third node the job runs without n2; with two nodes it fails with the reason."""
    text = f'[ "$SLURMD_NODENAME" != n2 ] || exit 9\nexec {find_chromium()} "$@"'
    program = write_program(tmp_path / "program", text)
    sizes = ("cluster.nodes=2", "trainer.data_parallel=2", "rollout.engines=2", f"browser.executable={program}")
    with virtual_slurm(3) as cluster:
        for nodes, state, chosen in ((3, "COMPLETED", "job: nodes: n1 n3"), (2, "FAILED", "1 of 2 nodes passed")):
            folder = tmp_path / str(nodes)
            folder.mkdir()
            job = submit(
                cluster, folder, "train_cpu.sh", *overrides(folder, f"checked{os.getpid()}"), *sizes,
                "ring.capacity_mib=16", "trainer.image_workers=0", options=(f"--nodes={nodes}",),
                STUB_COMMAND=f"{PAYLOAD} --finish",
            )  # fmt: skip
            assert cluster.wait(job, 240) == state, log(folder)
            assert f"job: excluding n2: browser: {program} loads no page: exit code 9" in log(folder)
            assert chosen in log(folder)
    assert "--exclude=n2" in log(tmp_path / "2")


# -- scripts without a cluster ------------------------------------------------------------------------


@pytest.mark.parametrize(("script", "config"), [("train_32node.sh", "8b_32node"), ("train_cpu.sh", "quickstart")])
def test_a_dry_run_shows_every_process_without_a_cluster(script: str, config: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(
        ["bash", str(SCRIPTS / script)], env={**environment, "DRY_RUN": "1", "PYTHON": sys.executable},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("node ")]
    placed = place_processes(parse_config(f"configs/{config}.yaml")).processes
    assert len(lines) == len(placed)
    for process in placed:
        line = next(line for line in lines if line.startswith(f"node {process.node} {process.name}: "))
        assert f"-m megatron_webrl role runs/{config} {process.name} >> " in line
        assert not process.devices or f"CUDA_VISIBLE_DEVICES={','.join(map(str, process.devices))} " in line


def _common(folder: Path, command: str, **environment: str) -> str:
    """What a function of common.sh prints."""
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", f"source launch/slurm/common.sh; {command}"], env={**os.environ, "PATH": path, **environment},
        capture_output=True, text=True, timeout=20, check=True,
    ).stdout.strip()  # fmt: skip


def test_a_node_whose_name_resolves_to_loopback_is_reached_by_its_address(tmp_path: Path) -> None:
    for given, expected in (
        ("127.0.0.1", r"127\.0\.0\.1"), ("localhost", r"(?!127\.)[\d.]+"), ("10.1.2.3", r"10\.1\.2\.3"),
    ):  # fmt: skip
        write_program(tmp_path / "scontrol", f"echo NodeName=n1 NodeAddr={given} NodeHostName=n1")
        assert re.fullmatch(expected, _common(tmp_path, "address_of n1"))


def test_browsers_know_the_addresses_of_all_nodes_of_the_job(tmp_path: Path) -> None:
    text = """case "$2 $3" in
"hostnames a"*) echo localhost ;;
"hostnames b"*) echo 10.1.2.4 ;;
"node "*) echo NodeName=n1 NodeAddr=10.1.2.3 NodeHostName=n1; echo NodeName=n2 NodeAddr=2001:db8::7 NodeHostName=n2 ;;
esac"""
    write_program(tmp_path / "scontrol", text)
    groups = {f"SLURM_JOB_NODELIST{name}": value for name, value in
              (("", "a[1-2]"), ("_HET_GROUP_0", "a[1-2]"), ("_HET_GROUP_1", "b1"))}  # fmt: skip
    found = set(_common(tmp_path, "export_job_addresses; printenv WEBRL_JOB_ADDRESSES", **groups).split(","))
    assert {"127.0.0.1", "10.1.2.3", "10.1.2.4", "2001:db8::7"} <= found | ({"127.0.0.1"} if "::1" in found else set())


def test_modules_and_an_apptainer_image_are_used_for_every_command(tmp_path: Path) -> None:
    """Neither is installed: stand-ins record how they are called."""
    calls = tmp_path / "calls"
    text = f'echo "$@" >>{calls}\nwhile [ "$1" != my.sif ]; do shift; done\nshift\nexec "$@"'
    write_program(tmp_path / "apptainer", text)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DRY_RUN": "1", "PYTHON": sys.executable,
        "CONTAINER": "my.sif", "MOUNTS": "/data:/data", "MODULES": "cuda/12.8 gcc/13",
        "BASH_FUNC_module%%": f'() {{ echo "module $*" >>{calls}; }}',
    }  # fmt: skip
    command = ["bash", str(SCRIPTS / "train_cpu.sh"), "run.name=contained"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "node 0 trainer-0: " in done.stdout
    *modules, call = calls.read_text().splitlines()
    assert modules == ["module load cuda/12.8", "module load gcc/13"]
    assert call.startswith(
        f"exec --nv --bind {ROOT},/data:/data --pwd {ROOT} my.sif {sys.executable} -m megatron_webrl"
    )
    assert call.endswith("run.name=contained")
