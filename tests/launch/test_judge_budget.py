"""A whole job with secrets whose judge's budget is spent.

Each of its secrets is a canary: keys, tokens, and the passwords of addresses, in its environment. None may be in the
environment of a browser's process, the command line of any process, a file of the run (logs, configuration, pages,
checkpoints), its output, or MLflow's database, artifacts and log.
"""

from __future__ import annotations

import json
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_webrl.judge.budget import HOUR_SECONDS, USAGE_FILE, read_usage
from megatron_webrl.types import BUDGET_SPENT
from tests.launch.whole_jobs import Job, assert_nothing_left
from tests.track.mlflow_server import mlflow_server
from tools.judge_endpoint.process import endpoint_process, stats_of

CALLS = 7  # an update of four episodes takes at least four
NAMES = ("JUDGE_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WEBRL_BROWSERS_TOKEN", "WEBRL_MONITOR_TOKEN")
CANARIES = {name: f"canary-{name.lower()}-{secrets.token_hex(8)}" for name in (*NAMES, "mlflow", "proxy")}
BROWSER_NAMES = ("chrom", "headless", "node")


def environment(mlflow: str) -> dict[str, str]:
    """Variables of the job: MLflow's and the proxy's canaries are passwords in addresses."""
    proxy, local = f"http://someone:{CANARIES['proxy']}@127.0.0.1:9", "127.0.0.1,localhost"
    return {name: CANARIES[name] for name in NAMES} | {
        "MLFLOW_TRACKING_URI": mlflow.replace("://", f"://someone:{CANARIES['mlflow']}@"),
        "HTTPS_PROXY": proxy, "https_proxy": proxy, "NO_PROXY": local, "no_proxy": local,
    }  # fmt: skip


def leaks(text: str, place: str) -> set[str]:
    return {f"{name} in {place}" for name, value in CANARIES.items() if value in text}


def search_processes(job: Job) -> set[str]:
    """Search the job's processes until it ends."""
    browsers, commands, found = set(), set(), set()
    deadline = time.monotonic() + 400.0
    assert job.process is not None
    while job.process.poll() is None and time.monotonic() < deadline:
        for process in job.processes():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                commands.add("\0".join(process.cmdline()))
                if process.name().startswith(BROWSER_NAMES):
                    browsers.add(process.pid)
                    found |= leaks(str(process.environ()), f"environment of {process.name()}")
        time.sleep(0.1)
    assert browsers
    assert commands
    return found.union(*(leaks(command, f"command line {command[:60]!r}") for command in commands))


def search_files(*places: Path) -> set[str]:
    found: set[str] = set()
    for path in (path for place in places for path in (place, *place.rglob("*")) if path.is_file()):
        found |= leaks(path.read_bytes().decode("latin-1"), str(path))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_spent_budget_ends_the_job_with_a_checkpoint_and_no_secret_leaves_it(job: Job, tmp_path: Path):
    """A smaller test could not show that the trainer keeps what the workers of a job have counted, nor that no library
    of any role prints or stores a secret.
    """
    with mlflow_server(tmp_path / "mlflow") as server, endpoint_process(tmp_path) as url:
        began = time.time() // HOUR_SECONDS
        job.start(
            "trainer.updates=20", "tracking.keep_records=true", f"judge.budget.calls_per_hour={CALLS}",
            "judge.evaluators=[judge]", "judge.verdict.name=oracle", f"judge.verdict.url={url}",
            "judge.verdict.key_variable=JUDGE_KEY", environment=environment(server.uri),
        )  # fmt: skip
        assert not search_processes(job)
        assert job.wait(1) == 0, job.output()
        summary = job.summary()
        assert summary["outcome"] == BUDGET_SPENT
        assert summary["accounting"]["matches"]
        done = json.loads(Path(summary["checkpoint"], "state.json").read_text())["version"]
        assert done == len(summary["updates"])
        assert_nothing_left(job)
        sent = stats_of(url)["requests"]
        if began == time.time() // HOUR_SECONDS:  # else the budget began again
            assert sent <= CALLS
            assert read_usage(job.run_folder / USAGE_FILE)[1].calls == sent
        assert not search_files(job.run_folder, job.folder / "out.log", server.folder)
        open_to_others = stat.S_IRWXG | stat.S_IRWXO
        paths = [path for path in (job.run_folder, *job.run_folder.rglob("*")) if not path.is_symlink()]
        assert not [path for path in paths if path.stat().st_mode & open_to_others]
