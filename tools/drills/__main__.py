"""`python -m tools.drills`: run fault drills and tell what came of them. tools/drill.sh, docs/operations.md"""

from __future__ import annotations

import argparse
import json
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

from megatron_webrl import processes
from tests.virtual_nodes import small_disk
from tests.virtual_slurm import Cluster, virtual_slurm, why_not
from tools.drills.faults import DRILLS, Drill
from tools.drills.run import START_SECONDS, DrillError, Run, left_on

NODES = 4
SCRATCH = "drills-"
BEFORE = 2  # updates before the fault
END_SECONDS = 1200.0
LEFT_SECONDS = 30.0  # for processes of a job to be gone after it
DISK_MIB = 640
OPEN_AT_END = 4  # tickets in flight: (max_staleness + 1) * groups_per_update of tests/tiny_settings.py


@dataclass
class Result:
    """What came of a drill."""

    drill: str
    fault: str
    happened: list[str] = field(default_factory=list)  # what the logs have told people after the fault
    seconds: float | None = None  # from the fault to the end of the next update
    wrong: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether everything is as promised."""
        return not self.wrong


def main() -> int:
    """Run the drills; returns 0 if all went as promised."""
    parser = argparse.ArgumentParser(prog="tools/drill.sh", description="Fault drills on a Slurm of virtual nodes.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(DRILLS)} (default: all)")
    parser.add_argument("--list", action="store_true", help="say what each does, and start nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE, too")
    parser.add_argument("--keep", action="store_true", help="keep the runs and their logs, and say where")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in DRILLS]:
        parser.error(f"{unknown[0]} is not one of {', '.join(DRILLS)}")
    if options.list:
        print("\n".join(f"{drill.name:<10} {drill.fault}" for drill in DRILLS.values()))
        return 0
    if reason := why_not(namespaces=True):
        sys.stderr.write(f"drill: {reason}\n")
        return 2
    processes.sweep_scratch(SCRATCH)  # of drills that were killed
    folder = Path(tempfile.mkdtemp(prefix="kept-drills-")) if options.keep else processes.scratch_folder(SCRATCH)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it tidies up, as after Ctrl-C
    try:
        results = run_drills([DRILLS[name] for name in options.names or DRILLS], folder)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    Console(width=140).print(table(results))
    if options.keep:
        print(f"runs and logs: {folder}")
    return 0 if all(result.well for result in results) else 1


def run_drills(drills: Sequence[Drill], folder: Path) -> list[Result]:
    """Run drills one after another on one cluster, each with a job of its own in `folder`."""
    disk = folder / "small disk"
    disk.mkdir()
    with small_disk(disk, DISK_MIB), virtual_slurm(NODES, namespaces=True, shared=[folder]) as cluster:
        results = []
        for drill in drills:
            (folder / drill.name).mkdir()
            result = perform(drill, cluster, folder / drill.name, disk)
            words = "well" if result.well else "; ".join(result.wrong)
            print(f"{drill.name}: {words}", flush=True)
            results.append(result)
        return results


def perform(drill: Drill, cluster: Cluster, folder: Path, disk: Path) -> Result:
    """One drill, from sbatch to a tidy cluster."""
    result = Result(drill.name, drill.fault)
    run = Run.submit(cluster, folder, sys.executable, BEFORE + drill.after)
    try:
        if drill.small_disk:
            run.await_(run.run_folder.is_dir, "folder of the run", START_SECONDS)
            (run.run_folder / "checkpoints").symlink_to(disk)
        _watch(drill, run, result)
    except (DrillError, AssertionError, OSError) as error:
        result.wrong.append(str(error))
        cluster.run("scancel", run.job)
    result.wrong += _left(cluster, drill.loses)
    if drill.loses and not cluster.first_process(drill.loses):
        cluster.start_node(drill.loses)
    return result


def _watch(drill: Drill, run: Run, result: Result) -> None:
    from tests.run_checks import wrong_with

    run.await_(lambda: run.saved() >= BEFORE, f"checkpoint of update {BEFORE}", START_SECONDS)
    lives, said, struck = run.lives(*drill.same), run.sizes(), time.time()
    drill.strike(run)
    since = struck
    if drill.requeued:  # what the job still makes before its end is no recovery
        run.await_(run.restarts, "start of the job again", END_SECONDS)
        since = time.time()
    next_update = run.await_(lambda: run.finished_after(since), "update after the fault", END_SECONDS)
    result.seconds = next_update - struck
    if changed := sorted(name for name, begun in run.lives(*drill.same).items() if lives.get(name) != begun):
        result.wrong.append(f"started again: {', '.join(changed)}")
    state = run.wait(END_SECONDS)
    result.happened = run.said_since(said)
    if state != "COMPLETED":
        result.wrong.append(f"the job is {state}: {run.last_words()}")
        return
    result.wrong += wrong_with(run.run_folder, run.updates, OPEN_AT_END)
    if bool(run.restarts()) != drill.requeued:
        result.wrong.append(f"Slurm started the job again {run.restarts()} times")
    if not re.search(drill.says, "\n".join(result.happened)):
        result.wrong.append(f"the log does not say: {drill.says}")


def _left(cluster: Cluster, lost: str) -> list[str]:
    deadline = time.monotonic() + LEFT_SECONDS
    nodes = [f"n{number}" for number in range(1, cluster.nodes + 1)]
    while left := [each for node in nodes if node != lost for each in left_on(cluster, node)]:
        if time.monotonic() > deadline:
            return [f"left behind: {', '.join(left)}"]
        time.sleep(0.5)
    return []


def table(results: Sequence[Result]) -> Table:
    """The results for people."""
    found = Table("drill", "fault", "what happened", "s to the next update", "result")
    for result in results:
        happened = "\n".join(line[:150] for line in result.happened[:4])
        seconds = "-" if result.seconds is None else f"{result.seconds:.0f}"
        found.add_row(result.drill, result.fault, happened, seconds, "well" if result.well else "\n".join(result.wrong))
    return found


if __name__ == "__main__":
    sys.exit(main())
