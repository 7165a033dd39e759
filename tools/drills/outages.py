"""`python -m tools.drills.outages`: what an MLflow or a name server that fails costs training, and whether data are
lost.

A process logs updates as a trainer does, one a second, 150 metrics each, to a real MLflow server that is healthy,
stopped or suspended, to an address that swallows connections, and to a name that no name server resolves. The time that
its calls take, and the processor time of the thread that sends, count as lost training time: below 1 % is the goal.
Afterwards `webrl upload` sends what is left to the server, which must then have each update once. The last two outages
take ten minutes, at the same time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlflow.tracking import MlflowClient

from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.track import summary
from megatron_webrl.track.mlflow_upload import END_SECONDS, MLflowTracker, UploadState
from tests.name_server import NAME, silent_name_server, why_no_namespace
from tests.track.mlflow_server import MLflowServer, black_hole, mlflow_server
from tools.arguments import make_bench_parser, write_json

UPDATE_SECONDS = 1.0
METRICS = 150
LIMIT = 0.01  # of training time
OUTAGES = ("none", "stopped", "suspended", "black hole", "no names")
LONG = OUTAGES[3:]


@dataclass(frozen=True)
class OutageResult:
    """One outage. `lost`: share of training time."""

    outage: str
    seconds: float
    updates: int
    call_seconds: float  # of the trainer's calls
    thread_cpu_seconds: float  # of the thread that sends
    end_seconds: float  # that the end of the job waited
    sent_before: int  # updates that MLflow had at the end of the job
    sent_after: int  # after webrl upload
    lost: float
    passed: bool


def log_updates(folder: Path, seconds: float) -> None:
    """The process that logs; prints what it measured. The environment names MLflow."""
    config = Config()
    config.run.directory = str(folder)
    config.run_folder.mkdir()
    save_config(config, config.run_folder / "config.yaml")
    started, calls, updates = time.monotonic(), 0.0, 0
    tracker, history = MLflowTracker(config), summary.open_updates(config.run_folder)
    calls += time.monotonic() - started
    time.sleep(5 * UPDATE_SECONDS)  # the import of MLflow's client belongs to the start
    assert tracker.thread.ident is not None
    clock = time.pthread_getcpuclockid(tracker.thread.ident)
    cpu_at_start = time.clock_gettime(clock)
    while time.monotonic() - started < seconds:
        time.sleep(UPDATE_SECONDS)
        updates += 1
        before = time.monotonic()
        metrics = {f"metric/{number}": number + updates / 7 for number in range(METRICS)}
        history.append({"version": updates, "finished_at": time.time(), "seconds": {}, "extra": metrics})
        calls += time.monotonic() - before
    cpu, ended = time.clock_gettime(clock) - cpu_at_start, time.monotonic()
    tracker.close("FINISHED")
    measured = {
        "seconds": ended - started, "updates": updates, "call_seconds": calls, "thread_cpu_seconds": cpu,
        "end_seconds": time.monotonic() - ended,
    }  # fmt: skip
    sys.stdout.write(json.dumps(measured) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a lookup that hangs must not count as a wait of the drill


def start(folder: Path, uri: str, seconds: float, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [
        *prefix,
        sys.executable,
        "-m",
        "tools.drills.outages",
        "--log-to",
        str(folder),
        "--seconds",
        str(seconds),
    ]
    folder.mkdir()
    environment = {**os.environ, "MLFLOW_TRACKING_URI": uri}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def finish(outage: str, process: subprocess.Popen[str], folder: Path, server: MLflowServer) -> OutageResult:
    """Wait for a process, upload what it could not send, and check what MLflow has."""
    output, _ = process.communicate()
    assert process.returncode == 0, outage
    measured = json.loads(output.splitlines()[-1])
    run = folder / Config().run.name
    if outage == "suspended":
        server.resume()
    if outage == "stopped":
        server.start()
    before = len(sent_steps(server, run))
    environment = {**os.environ, "MLFLOW_TRACKING_URI": server.uri}
    subprocess.run([sys.executable, "-m", "megatron_webrl", "upload", str(run)], env=environment, check=True)
    steps = sent_steps(server, run)
    lost = (measured["call_seconds"] + measured["thread_cpu_seconds"]) / measured["seconds"]
    complete = steps == list(range(1, measured["updates"] + 1))
    passed = complete and lost < LIMIT and measured["end_seconds"] < END_SECONDS + 5
    return OutageResult(outage, **measured, sent_before=before, sent_after=len(steps), lost=lost, passed=passed)


def sent_steps(server: MLflowServer, run: Path) -> list[int]:
    """The updates of a run that the server has."""
    state = UploadState.load(run)
    if state is None or state.run_id is None:
        return []
    history = MlflowClient(server.uri).get_metric_history(state.run_id, "metric/7")
    return sorted(metric.step for metric in history)


def run_drill(folder: Path, outages: Sequence[str], short: float, long: float) -> list[OutageResult]:
    """`short` and `long`: seconds of the outages; the long ones run side by side."""
    results = []
    with mlflow_server(folder / "server") as server:
        for outage in (each for each in outages if each not in LONG):
            if outage == "stopped":
                server.stop()
            if outage == "suspended":
                server.pause()
            place = folder / outage
            results.append(finish(outage, start(place, server.uri, short), place, server))
        with black_hole() as hole, silent_name_server(folder) as prefix:
            places = {"black hole": (hole, []), "no names": (f"http://{NAME}:5000", prefix)}
            running = {
                outage: start(folder / outage, uri, long, before)
                for outage, (uri, before) in places.items()
                if outage in outages
            }
            results += [finish(outage, process, folder / outage, server) for outage, process in running.items()]
    return results


def main() -> int:
    """Run the drill; returns 0 if the goals hold."""
    parser = make_bench_parser(__doc__, quick="outages of 20 s")
    parser.add_argument("--log-to", type=Path, help="internal: be the process that logs")
    parser.add_argument("--seconds", type=float, help="internal: its duration")
    options = parser.parse_args()
    if options.log_to:
        log_updates(options.log_to, options.seconds)
    outages = [outage for outage in OUTAGES if outage != "no names" or not why_no_namespace()]
    with tempfile.TemporaryDirectory(prefix="outages-") as name:
        results = run_drill(Path(name), outages, 20.0 if options.quick else 120.0, 20.0 if options.quick else 600.0)
    write_json(options.json, [asdict(result) for result in results])
    for result in results:
        sys.stdout.write(
            f"{result.outage:<10} {result.seconds:6.1f} s, {result.updates} updates: calls {result.call_seconds:.3f} "
            f"s, thread {result.thread_cpu_seconds:.3f} s, {result.lost:.2%} of training; end waited "
            f"{result.end_seconds:.1f} s; in MLflow {result.sent_before}, after upload {result.sent_after}"
            f"{'' if result.passed else ': FAILED'}\n"
        )
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
