"""`python -m tools.drills`: run fault drills and report their results; see tools/drill.sh and docs/operations.md."""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_webrl.control import child_process
from tests.launch.slurm.virtual_nodes import small_disk
from tests.launch.slurm.virtual_slurm import Cluster, virtual_slurm, why_not
from tools.arguments import write_json
from tools.drills.faults import DRILLS, Drill
from tools.drills.run import START_SECONDS, DrillError, DrillJob, leftovers_on

NODES = 4
SCRATCH_PREFIX = "drills-"
UPDATES_BEFORE_FAULT = 2  # updates before the fault
JOB_SECONDS = 1200.0
CLEANUP_SECONDS = 30.0  # limit for the processes of a job to end after it
DISK_MIB = 640
SLURMD_SECONDS = 120  # time after which Slurm sees a node that does not answer as down: longer than the cut of a link
OPEN_TICKETS_AT_END = 4  # tickets in flight: (max_staleness + 1) * groups_per_update of tests/tiny_settings.py


@dataclass
class DrillResult:
    """Result of one drill."""

    drill: str
    fault: str
    log_lines: list[str] = field(default_factory=list)  # after the fault
    recovery_seconds: float | None = None  # from the fault to the end of the next update
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return not self.problems


def main() -> int:
    """Run the drills; returns 0 if all passed."""
    parser = argparse.ArgumentParser(prog="tools/drill.sh", description="Fault drills on a Slurm of virtual nodes.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(DRILLS)} (default: all)")
    parser.add_argument("--list", action="store_true", help="list the drills and exit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--keep", action="store_true", help="keep the runs and their logs, and print their folder")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in DRILLS]:
        parser.error(f"{unknown[0]} is not one of {', '.join(DRILLS)}")
    if options.list:
        print("\n".join(f"{drill.name:<10} {drill.fault}" for drill in DRILLS.values()))
        return 0
    if reason := why_not(namespaces=True):
        sys.stderr.write(f"drill: {reason}\n")
        return 2
    child_process.sweep_scratch(SCRATCH_PREFIX)  # left by killed drills
    folder = (
        Path(tempfile.mkdtemp(prefix="kept-drills-"))
        if options.keep
        else child_process.make_scratch_folder(SCRATCH_PREFIX)
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    try:
        results = run_drills([DRILLS[name] for name in options.names or DRILLS], folder)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    write_json(options.json, [asdict(result) for result in results])
    Console(width=140).print(results_table(results))
    if options.keep:
        print(f"runs and logs: {folder}")
    return 0 if all(result.passed for result in results) else 1


def run_drills(drills: Sequence[Drill], folder: Path) -> list[DrillResult]:
    """Run drills one after another on one cluster, each with a job of its own in `folder`."""
    disk = folder / "small disk"
    disk.mkdir()
    with (
        small_disk(disk, DISK_MIB),
        virtual_slurm(NODES, namespaces=True, shared=[folder], slurmd_seconds=SLURMD_SECONDS) as cluster,
    ):
        results = []
        for drill in drills:
            place = (disk if drill.on_disk == "run" else folder) / drill.name
            place.mkdir()
            result = run_drill(drill, cluster, place, disk)
            verdict = "passed" if result.passed else "; ".join(result.problems)
            print(f"{drill.name}: {verdict}", flush=True)
            results.append(result)
        return results


def run_drill(drill: Drill, cluster: Cluster, folder: Path, disk: Path) -> DrillResult:
    """Run one drill, from sbatch until the cluster is clean again."""
    result = DrillResult(drill.name, drill.fault)
    run = DrillJob.submit(cluster, folder, sys.executable, UPDATES_BEFORE_FAULT + drill.updates_after)
    try:
        if drill.on_disk == "checkpoints":
            _move_checkpoints(run, disk)
        _inject_and_check(drill, run, result)
    except (DrillError, AssertionError, OSError) as error:
        result.problems.append(str(error))
        cluster.run("scancel", run.job_id)
    result.problems += _leftovers(cluster, drill.lost_node)
    if drill.lost_node and not cluster.first_process(drill.lost_node):
        cluster.start_node(drill.lost_node)
    return result


def _move_checkpoints(run: DrillJob, disk: Path) -> None:
    """Put the folder of the checkpoints on a disk, before there is one."""
    folder = run.run_folder / "checkpoints"
    run.wait_for((run.run_folder / "config.yaml").is_file, "folder of the run", START_SECONDS)
    shutil.copytree(folder, disk, dirs_exist_ok=True)
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(disk)


def _inject_and_check(drill: Drill, run: DrillJob, result: DrillResult) -> None:
    from tests.finished_runs import run_problems

    run.wait_for(
        lambda: run.checkpoint_version() >= UPDATES_BEFORE_FAULT,
        f"checkpoint of update {UPDATES_BEFORE_FAULT}",
        START_SECONDS,
    )
    start_times, log_sizes, injected_at = run.start_times(*drill.must_survive), run.log_sizes(), time.time()
    drill.inject(run)
    since = injected_at
    if drill.requeued:  # updates before the requeue are no recovery
        run.wait_for(run.restarts, "restart of the job", JOB_SECONDS)
        since = time.time()
    next_update = run.wait_for(lambda: run.first_update_after(since), "update after the fault", JOB_SECONDS)
    result.recovery_seconds = next_update - injected_at
    if changed := sorted(
        name for name, started in run.start_times(*drill.must_survive).items() if start_times.get(name) != started
    ):
        result.problems.append(f"restarted: {', '.join(changed)}")
    state = run.wait_until_ended(JOB_SECONDS)
    result.log_lines = run.log_lines_since(log_sizes)
    if state != "COMPLETED":
        result.problems.append(f"the job is {state}: {run.last_log_line()}")
        return
    result.problems += run_problems(run.run_folder, run.updates, OPEN_TICKETS_AT_END)
    if bool(run.restarts()) != drill.requeued:
        result.problems.append(f"Slurm restarted the job {run.restarts()} times")
    if not re.search(drill.log_pattern, "\n".join(result.log_lines)):
        result.problems.append(f"no line of the log matches: {drill.log_pattern}")


def _leftovers(cluster: Cluster, lost: str) -> list[str]:
    deadline = time.monotonic() + CLEANUP_SECONDS
    nodes = [f"n{number}" for number in range(1, cluster.nodes + 1)]
    while left := [each for node in nodes if node != lost for each in leftovers_on(cluster, node)]:
        if time.monotonic() > deadline:
            return [f"left behind: {', '.join(left)}"]
        time.sleep(0.5)
    return []


def results_table(results: Sequence[DrillResult]) -> Table:
    """The results as a table."""
    table = Table("drill", "fault", "log", "s to the next update", "result")
    for result in results:
        lines = "\n".join(line[:150] for line in result.log_lines[:4])
        seconds = "-" if result.recovery_seconds is None else f"{result.recovery_seconds:.0f}"
        table.add_row(
            result.drill, result.fault, lines, seconds, "passed" if result.passed else "\n".join(result.problems)
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
