"""Whole jobs on a real Slurm of virtual nodes: sbatch of the scripts in launch/slurm/."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megatron_webrl.browser.chromium import find_chromium
from megatron_webrl.config.load import parse_config
from megatron_webrl.placement.cores import parse_cores
from megatron_webrl.placement.placement import place_processes
from tests.launch.slurm.slurm_jobs import PAYLOAD, ROOT, SCRIPTS, log, overrides, rings, submit
from tests.launch.slurm.virtual_slurm import Cluster, free_ports, virtual_slurm, why_not
from tests.tiny_settings import SETTINGS
from tests.waiting import until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

REHEARSAL_SECONDS = 180.0


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with virtual_slurm(4, gpus=8, cores=112) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    ["8b_32node", pytest.param("235b_a22b_32node", marks=pytest.mark.soak)],  # the second has engines over two nodes
)
def test_a_job_of_32_nodes_and_256_gpus_is_placed_as_planned(tmp_path: Path, config: str) -> None:
    name = f"stubs{os.getpid()}"
    with virtual_slurm(32, gpus=8, cores=112) as cluster:
        began = time.monotonic()
        job = submit(
            cluster, tmp_path, "train_32node.sh", *overrides(tmp_path, name), STUB_COMMAND=PAYLOAD, PREFLIGHT="0",
            CONFIG=f"configs/{config}.yaml",
        )  # fmt: skip
        state = cluster.wait(job, REHEARSAL_SECONDS)
        seconds = time.monotonic() - began
    assert state == "COMPLETED", log(tmp_path)
    assert seconds < REHEARSAL_SECONDS
    found = json.loads((tmp_path / name / "stubs.json").read_text())
    _check_all(found, tmp_path / name / "config.yaml")
    print(f"from sbatch to the end of the job: {seconds:.1f} s")  # noqa: T201
    assert not rings(name)


def _check_all(found: list[dict[str, Any]], settings: Path) -> None:
    """Compare the facts that the processes of a job report with the machines of the configuration."""
    config = parse_config(settings)
    cluster = config.cluster
    parts = config.rollout.engines * max(1, config.ranks_per_engine // cluster.engine_gpus_per_node)
    assert (cluster.nodes, cluster.gpus_per_node, len(found)) == (32, 8, 128 + parts)
    assert sorted(each["index"] for each in found if each["role"] == "trainer") == list(range(128))
    serving = [each for each in found if each["role"] == "rollout"]
    assert sorted(each["index"] for each in serving if not each["follower"]) == list(range(config.rollout.engines))
    assert len({(each["index"], each["follower"]) for each in serving}) == parts
    everything = sorted(core for text in cluster.numa_cores for core in parse_cores(text))
    nodes: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for each in found:
        nodes[each["node"]].append(each)
    assert sorted(nodes) == list(range(32))
    for node, here in nodes.items():
        assert sorted(device for each in here for device in each["devices"]) == list(range(8))  # disjoint, and complete
        assert sorted(core for each in here for core in each["cores"]) == everything
        assert {tuple(each["slurm"]) for each in here} == {(node, f"n{node + 1}")}
        workers = [each for each in here if each["role"] == "rollout"]
        assert len({each["meeting"][1] for each in workers}) == len(workers)
        assert len({each["ring"] for each in here}) == 1
    assert len({here[0]["ring"] for here in nodes.values()}) == 32
    assert {each["world"] for each in found if each["role"] == "trainer"} == {128}
    assert len({tuple(each["meeting"]) for each in found if each["role"] == "trainer"}) == 1
    assert len({each["pid"] for each in found}) == len(found)
    assert {ring.name for ring in place_processes(config).rings} == {each["ring"] for each in found}


@pytest.mark.slow
def test_a_role_that_fails_ends_the_job_with_its_name(four: Cluster, tmp_path: Path) -> None:
    name = f"failing{os.getpid()}"
    job = submit(
        four, tmp_path, "train_nodes.sh", *overrides(tmp_path, name), "cluster.nodes=4", "run.max_trainer_restarts=0",
        options=("--nodes=4",),
        STUB_COMMAND=f"{PAYLOAD} --fail trainer-9", PREFLIGHT="0",
    )  # fmt: skip
    assert four.wait(job, 300) == "FAILED", log(tmp_path)
    outcome = json.loads((tmp_path / name / "summary.json").read_text())["outcome"]
    assert outcome.startswith("failed: trainer-9 exited with code 1; last log line: it fails on purpose")
    assert outcome in log(tmp_path)
    for path in rings(name):
        path.unlink()  # the payload leaves it behind


def test_a_bad_configuration_is_refused_before_anything_starts(four: Cluster, tmp_path: Path) -> None:
    job = submit(
        four, tmp_path, "train_nodes.sh", *overrides(tmp_path, "bad"), "trainer.tensor_parallel=3",
        options=("--nodes=4",), STUB_COMMAND=PAYLOAD,
    )  # fmt: skip
    assert four.wait(job, 180) == "FAILED"
    assert "webrl: trainer.data_parallel=0: 4 x 4 GPUs" in log(tmp_path)
    assert not (tmp_path / "bad").exists()


def test_a_job_with_too_few_nodes_says_so(four: Cluster, tmp_path: Path) -> None:
    job = submit(
        four, tmp_path, "train_nodes.sh", *overrides(tmp_path, "few"), options=("--nodes=2",), STUB_COMMAND=PAYLOAD,
        PREFLIGHT="0",
    )  # fmt: skip
    assert four.wait(job, 180) == "FAILED"
    assert "cluster.nodes=4, but the job has 2 nodes" in log(tmp_path)


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
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    assert (summary["outcome"], len(summary["updates"]), summary["accounting"]["matches"]) == ("finished", 1, True)
    assert "job: browsers on 1 nodes" in log(tmp_path)
    assert not list((tmp_path / name / "logs").glob("*browsers*"))  # of own nodes


@pytest.mark.slow
def test_two_nodes_are_checked_with_each_other_and_reported(four: Cluster, tmp_path: Path) -> None:
    job = submit(
        four, tmp_path, "gpu_check.sh", *overrides(tmp_path, "checked"), options=("--nodes=2", "--gpus-per-node=0"),
        CONFIG="configs/quickstart.yaml", GPU_CHECK_OPTIONS="--section nodes",
    )  # fmt: skip
    assert four.wait(job, 400) == "COMPLETED", log(tmp_path)
    report = json.loads((tmp_path / f"gpu-check-{job}" / "gpu-check.json").read_text())
    assert {each["section"] for each in report["results"]} == {"nodes"}
    found = {each["name"]: each for each in report["results"]}
    assert found["n1: link n2"]["value"] > 0
    assert found["n2: link n1"]["unit"] == "GiB/s"
    assert not [each for each in report["results"] if each["status"] != "passed"]


@pytest.mark.slow
def test_a_missing_model_is_a_line_of_the_report(four: Cluster, tmp_path: Path) -> None:
    job = submit(
        four, tmp_path, "gpu_check.sh", *overrides(tmp_path, "missing"), "model.path=/nowhere",
        options=("--nodes=1", "--gpus-per-node=0"), CONFIG="configs/quickstart.yaml",
        GPU_CHECK_OPTIONS="--section nodes --section engine",
    )  # fmt: skip
    assert four.wait(job, 400) == "FAILED", log(tmp_path)
    report = json.loads((tmp_path / f"gpu-check-{job}" / "gpu-check.json").read_text())
    [job_result] = [each for each in report["results"] if each["name"] == "a whole job"]
    assert job_result["status"] == "failed"
    assert "model.path=/nowhere is not a folder" in job_result["note"]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_model_is_evaluated_on_a_node(four: Cluster, tmp_path: Path, tiny_model: Path) -> None:
    path, result = tmp_path / "config.yaml", tmp_path / "result.json"
    path.write_text(yaml.safe_dump(SETTINGS))
    job = submit(
        four, tmp_path, "eval.sh", str(tiny_model), str(path), *overrides(tmp_path, "evaluated"), "--episodes", "1",
        "--json", str(result), MLFLOW_TRACKING_URI="",
    )  # fmt: skip
    assert four.wait(job, 400) == "COMPLETED", log(tmp_path)
    assert len(json.loads(result.read_text())["episodes"]) == 2  # of two environments


DEFAULTS = {
    "train_32node.sh": "8b_32node",
    "train_nodes.sh": "8b_4node",
    "train_1node.sh": "8b_1node",
    "train_cpu.sh": "quickstart",
}
CLUSTERS = sorted(path.stem for path in (ROOT / "configs").glob("*node.yaml"))


@pytest.mark.parametrize(
    ("script", "name"),
    [*((script, "") for script in DEFAULTS), *(("train_nodes.sh", name) for name in CLUSTERS)],
)
def test_a_dry_run_shows_every_process_without_a_cluster(script: str, name: str) -> None:
    """Of the script's default configuration, and of every configuration of a cluster."""
    path = f"configs/{name or DEFAULTS[script]}.yaml"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(
        ["bash", str(SCRIPTS / script)],
        env={**environment, "DRY_RUN": "1", "PYTHON": sys.executable, **({"CONFIG": path} if name else {})},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    config = parse_config(path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("node ")]
    assert len(lines) == len(place_processes(config).processes)
    for process in place_processes(config).processes:
        line = next(line for line in lines if line.startswith(f"node {process.node} {process.name}: "))
        assert f"-m megatron_webrl role runs/{config.run.name} {process.name} >> " in line
        assert not process.devices or f"CUDA_VISIBLE_DEVICES={','.join(map(str, process.devices))} " in line


def test_a_dry_run_without_this_package_says_so_in_one_line(tmp_path: Path) -> None:
    """With pyxis, PYTHON is usually the image's, which the machine of the dry run does not have."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    for script in ("train_nodes.sh", "eval.sh"):
        done = subprocess.run(
            ["bash", str(SCRIPTS / script), "models/quickstart"],
            env={**os.environ, "DRY_RUN": "1", "PYTHON": str(python), "CONTAINER": "my.sqsh"},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert f"DRY_RUN runs PYTHON={python} on this machine, which lacks what it needs" in done.stderr
        assert "No module named 'megatron_webrl'; give the Python of an environment with this package" in done.stderr


def test_a_cluster_and_its_jobs_die_with_its_parent() -> None:
    check_that_a_cluster_dies_with_its_starter("virtual_slurm(2)")


def check_that_a_cluster_dies_with_its_starter(cluster: str) -> None:
    """Of two nodes, started by this expression: nothing is left of it and of a job on both."""
    marker = f"30{os.getpid()}"  # seconds that a task of the job sleeps
    program = (
        "import sys; from tests.launch.slurm.virtual_slurm import virtual_slurm\n"
        f"with {cluster} as cluster:\n"
        f"    cluster.submit('--nodes=2', '--output=/dev/null', '--wrap=srun --nodes=2 --ntasks=2 sleep {marker}')\n"
        "    print(cluster.folder, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    test = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert test.stdout is not None
    folder = test.stdout.readline().strip()
    until(lambda: len(running("sleep", marker)) == 2, "both tasks to run", 30)
    assert len(running("slurmd", folder)) == 2
    test.kill()
    test.wait(10)
    until(lambda: not running("sleep", marker) and not running("", folder), "the end of all", 40)


def running(program: str, word: str) -> list[psutil.Process]:
    """Processes whose command line begins with a program whose path has such a name, and has a word in it."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if program in line.split(" ")[0] and word in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def test_a_node_whose_name_resolves_to_loopback_is_reached_by_its_address(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    for node_address, expected in (
        ("127.0.0.1", r"127\.0\.0\.1"),
        ("localhost", r"(?!127\.)[\d.]+"),
        ("10.1.2.3", r"10\.1\.2\.3"),
    ):
        program.write_text(f"#!/bin/sh\necho NodeName=n1 NodeAddr={node_address} NodeHostName=n1\n")
        program.chmod(0o755)
        done = subprocess.run(
            ["bash", "-c", "source launch/slurm/common.sh; address_of n1"],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        assert re.fullmatch(expected, done.stdout.strip()), done.stdout


def test_browsers_know_the_addresses_of_all_nodes_of_the_job(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    program.write_text(
        """#!/bin/sh
case "$2 $3" in
"hostnames a"*) echo localhost ;;
"hostnames b"*) echo 10.1.2.4 ;;
"node "*) echo NodeName=n1 NodeAddr=10.1.2.3 NodeHostName=n1; echo NodeName=n2 NodeAddr=2001:db8::7 NodeHostName=n2 ;;
esac
"""
    )
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", "source launch/slurm/common.sh; export_job_addresses; printenv WEBRL_JOB_ADDRESSES"],
        env={
            **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "a[1-2]",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_1": "b1",
        },
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    found = set(done.stdout.strip().split(","))
    assert {"127.0.0.1", "10.1.2.3", "10.1.2.4", "2001:db8::7"} <= found | ({"127.0.0.1"} if "::1" in found else set())


def test_modules_and_an_apptainer_image_are_used_for_every_command(tmp_path: Path) -> None:
    """Neither is installed: stand-ins record how they are called."""
    calls = tmp_path / "calls"
    program = tmp_path / "apptainer"
    program.write_text(
        f'#!/bin/bash\necho "$@" >>{calls}\nwhile [ "$1" != my.sif ]; do shift; done\nshift\nexec "$@"\n'
    )
    program.chmod(0o755)
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


@pytest.mark.slow
def test_a_job_excludes_a_bad_node(tmp_path: Path) -> None:
    """No browser starts on n2. With a third node the job runs without n2; with two nodes it fails with the reason."""
    chromium = find_chromium()
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" != n2 ] || exit 9\nexec {chromium} "$@"\n')
    program.chmod(0o755)
    sizes = ("cluster.nodes=2", "trainer.data_parallel=2", "rollout.engines=2", f"browser.executable={program}")
    with virtual_slurm(3) as cluster:
        for nodes, state in ((3, "COMPLETED"), (2, "FAILED")):
            folder = tmp_path / str(nodes)
            folder.mkdir()
            job = submit(
                cluster, folder, "train_cpu.sh", *overrides(folder, f"checked{os.getpid()}"), *sizes,
                "ring.capacity_mib=16", "trainer.image_workers=0", options=(f"--nodes={nodes}",), STUB_COMMAND=PAYLOAD,
            )  # fmt: skip
            assert cluster.wait(job, 240) == state, log(folder)
            assert f"job: excluding n2: browser: {program} loads no page: exit code 9" in log(folder)
    assert "job: nodes: n1 n3" in log(tmp_path / "3")
    assert "1 of 2 nodes passed the check" in log(tmp_path / "2")
    assert "--exclude=n2" in log(tmp_path / "2")
