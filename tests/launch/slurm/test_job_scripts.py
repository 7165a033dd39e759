"""The scripts of jobs alone: `srun` and `scontrol` are stand-ins that record how they are called."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.slurm.slurm_jobs import ROOT, SCRIPTS
from tests.waiting import until, write_program

SRUN = """line=$(printf '%q ' "$@"); echo "$line" >>"$CALLS"  # in one piece: two steps start at the same time
case " $* " in
    *" node ${DIES_AT:-none} "*) exit "$CODE" ;;
    *" node prepare "*) echo "${FOLDER:-runs/contained}/config.yaml" ;;
    *" check gpu "*) touch "$FOLDER/job.yaml" ;;
    *" check job "*) exit "$JUDGED" ;;
    *" node choose "*) echo n1 n2 ;;
    *" node control "*) while [ ! -e "$CALLS.stop" ]; do sleep 0.05; done; exit 75 ;;
    *" node stop "*"--lost"*)
        if [ ! -e "$CALLS.refused" ]; then touch "$CALLS.refused"; exit 1; fi # as if the control service were starting
        touch "$CALLS.stop" ;;
    *" node stop "*) touch "$CALLS.stop" ;;
esac
"""
SCONTROL = """case "$*" in
    "show hostnames"*) printf 'n1\\nn2\\nn3\\n' ;;
    "show node"*) echo "NodeName=$4 NodeAddr=127.0.0.1" ;;
    "show job"*)
        [ -z "${SILENT:-}" ] || exit 1
        echo "JobId=4711 JobState=RUNNING EndTime=Unknown PreemptTime=${PREEMPT_TIME:-None}" ;;
    requeue*)
        if [ -n "${SILENT:-}" ] && [ ! -e "$CALLS.asked" ]; then touch "$CALLS.asked"; exit 1; fi
        touch "$CALLS.requeued" ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        write_program(tmp_path / name, text)
    (tmp_path / "calls").touch()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    return {
        **kept, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "PYTHON": sys.executable,
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_SUBMIT_DIR": str(ROOT),
    }  # fmt: skip


def calls(folder: Path) -> list[list[str]]:
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]


def run_until_preempted(folder: Path, environment: dict[str, str]) -> list[list[str]]:
    """The calls of srun of a job that gets the notice of its end once it runs, and is requeued."""
    job = subprocess.Popen(["bash", str(SCRIPTS / "train_nodes.sh"), "run.name=contained"], cwd=ROOT, env=environment)
    try:
        until(lambda: sum("trainer" in call or "rollout" in call for call in calls(folder)) == 2, "both steps", 60)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()
    assert (folder / "calls.requeued").exists()
    assert next(call for call in calls(folder) if "stop" in call)[-1] == "--preempted"
    return calls(folder)


def run(script: str, environment: dict[str, str]) -> int:
    job = ["bash", str(SCRIPTS / script), "run.name=contained"]
    return subprocess.run(job, cwd=ROOT, env=environment, timeout=60, check=False).returncode


def test_every_step_uses_the_container_that_the_first_one_made(tmp_path: Path, environment: dict[str, str]) -> None:
    given = {"CONTAINER": "nvcr.io#nvidia/pytorch:26.01-py3", "MOUNTS": "/data:/data"}
    first, *steps = run_until_preempted(tmp_path, environment | given)
    assert first[-1] == "true"  # on all nodes, before two steps can start on one of them
    assert "--nodelist=n1,n2,n3" in first
    found = [" ".join(step[step.index("megatron_webrl") + 1 :][:2]) for step in steps]
    assert found[:3] == ["node prepare", "check node", "node choose"]
    assert sorted(found[3:]) == ["node control", "node rollout", "node stop", "node trainer"]
    for call in (first, *steps):
        assert "--container-name=webrl-4711:no_exec" in call
        assert "--container-image=nvcr.io#nvidia/pytorch:26.01-py3" in call
        assert f"--container-mounts={ROOT}:{ROOT},/data:/data" in call


def test_a_job_is_requeued_although_slurm_does_not_answer_at_first(tmp_path: Path, environment: dict[str, str]) -> None:
    found = run_until_preempted(tmp_path, environment | {"SILENT": "1"})
    assert (tmp_path / "calls.asked").exists()
    assert found[0][found[0].index("node") + 1] == "prepare"
    assert not [word for call in found for word in call if word.startswith("--container")]


@pytest.mark.parametrize(("step", "code"), [("prepare", 143), ("choose", 76)])
def test_a_job_preempted_before_its_start_is_requeued(
    tmp_path: Path, environment: dict[str, str], step: str, code: int
) -> None:
    """The signal ends the steps of the job, too; without a report of a check no node can be chosen."""
    given = environment | {"DIES_AT": step, "CODE": str(code), "SLURM_RESTART_COUNT": "1"}
    requeued = tmp_path / "calls.requeued"
    assert run("train_nodes.sh", given | {"PREEMPT_TIME": "2026-01-01T00:00:00"}) == 0
    requeued.unlink()
    held = code == 76  # too few good nodes
    assert run("train_nodes.sh", given) == (0 if held else code)
    assert requeued.exists() == held


def test_a_job_whose_browsers_all_end_is_requeued(tmp_path: Path, environment: dict[str, str]) -> None:
    components = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-3]", "SLURM_JOB_NODELIST_HET_GROUP_1": "b[1-3]"}
    assert run("train_split.sh", environment | components | {"DIES_AT": "browsers", "CODE": "1"}) == 0
    assert (tmp_path / "calls.requeued").exists()
    [servers] = [call for call in calls(tmp_path) if "browsers" in call and "node" in call]
    assert "--kill-on-bad-exit=0" in servers
    stops = [call for call in calls(tmp_path) if "stop" in call]
    assert len(stops) == 2
    assert stops[-1][-2:] == ["--lost", "all browser servers ended"]


def test_a_gpu_check_whose_job_is_lost_or_cannot_start_is_judged_and_not_requeued(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "calls.stop").touch()  # the control service ends at once, as if pre-empted
    given = environment | {"FOLDER": str(tmp_path), "CODE": "76"}
    for dies_at, judged, config in (("none", "1", "config.yaml"), ("choose", "0", "job.yaml")):
        (tmp_path / "calls").write_text("")
        assert run("gpu_check.sh", given | {"DIES_AT": dies_at, "JUDGED": judged}) == int(judged)
        found = [call[call.index("megatron_webrl") + 1 :] for call in calls(tmp_path)]
        assert ["check", "job", f"{tmp_path}/{config}", f"{tmp_path}/gpu-check.json"] in found
        started = {"trainer", "rollout"} & {call[1] for call in found}
        assert started == ({"trainer", "rollout"} if dies_at == "none" else set())
    assert not (tmp_path / "calls.requeued").exists()
