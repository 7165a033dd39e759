"""Preparation of a job, once on its first node: run folder, configuration, placement, and choice of nodes.

launches.jsonl has a line for each launch of a job that Slurm requeues: its checkpoint, and how the previous one ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path

from megatron_webrl.config.browser import BROWSER_SERVER_SETTINGS, BrowserConfig
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.launch.roles import log_folder, process_specs
from megatron_webrl.launch.run_folder import config_path, prepared_run_folder, report_folder
from megatron_webrl.launch.validation import check_job
from megatron_webrl.placement.memory_estimate import check_parallel_layout
from megatron_webrl.placement.placement import Placement, place_processes
from megatron_webrl.placement.placement_table import find_model_config, print_placement
from megatron_webrl.track import summary
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.util import atomic_file

LAUNCHES_FILE = "launches.jsonl"
UNKNOWN_OUTCOME = "without a summary: it was killed, or a node was lost"


@dataclass(frozen=True)
class JobLaunch:
    slurm_job_id: str  # a requeue keeps it
    restart_count: int  # 0 for the first launch
    checkpoint: str | None  # the newest complete checkpoint at launch, such as "version-000005"
    previous_outcome: str | None  # of the previous launch; None for the first
    time: float  # unix time, seconds

    @property
    def message(self) -> str:
        """A line for the log; empty for the first launch."""
        if not self.restart_count:
            return ""
        source = f"resuming from {self.checkpoint}" if self.checkpoint else "starting over, no checkpoint is complete"
        number = f"launch {self.restart_count + 1} of job {self.slurm_job_id}"
        return f"{number}, {source}; the previous launch ended: {self.previous_outcome}"


def latest_checkpoint_name(folder: Path) -> str | None:
    """Name of the newest complete checkpoint of a run."""
    newest = find_latest_checkpoint(folder)
    return newest.name if newest else None


def read_launches(folder: Path) -> list[JobLaunch]:
    path = folder / LAUNCHES_FILE
    return [JobLaunch(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def write_launches(folder: Path, launches: Sequence[JobLaunch]) -> None:
    atomic_file.write_text(folder / LAUNCHES_FILE, "".join(json.dumps(asdict(launch)) + "\n" for launch in launches))


def record_launch(config: Config, environment: Mapping[str, str]) -> list[JobLaunch]:
    """The launches of a run with the current one; outside Slurm only the recorded ones.

    Raises ConfigError, and writes it to summary.json, after run.max_trainer_restarts requeues without a newer
    checkpoint.
    """
    folder = config.run_folder
    earlier = read_launches(folder)
    if "SLURM_JOB_ID" not in environment:
        return earlier
    job, restart = environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT", "0"))
    own = [each for each in earlier if each.slurm_job_id == job]
    previous_outcome = UNKNOWN_OUTCOME if restart else None
    if own:
        path = folder / "summary.json"
        previous_outcome = json.loads(path.read_text())["outcome"] if path.is_file() else UNKNOWN_OUTCOME
    checkpoint = latest_checkpoint_name(folder) if own or config.run.resume else None  # otherwise an earlier run's
    launch = JobLaunch(job, restart, checkpoint, previous_outcome, time.time())
    same = [each for each in own if each.checkpoint == checkpoint]
    if restart and len(same) > config.run.max_trainer_restarts:
        outcomes = "; ".join(filter(None, [*(each.previous_outcome for each in same), previous_outcome]))
        reason = (
            f"job {job} was launched {len(same)} times from {launch.checkpoint or 'no checkpoint'} and made no newer "
            f"one (run.max_trainer_restarts={config.run.max_trainer_restarts}); its launches ended: {outcomes}. Logs: "
            f"{folder / 'logs'}"
        )
        summary.write_summary(folder, f"failed: {reason}", None)
        way = "Submit it again" if config.evaluation.only else "To resume, submit it again with run.resume=true"
        raise ConfigError(f"{reason}. {way}")
    return [*earlier, launch]


def plan_processes(config: Config) -> Placement:
    """Place the processes of a configuration, without looking at any machine. Raises ConfigError."""
    check_sections(config)
    description = find_model_config(config)
    if description is not None:
        check_parallel_layout(config, description)
    return place_processes(config)


def prepare_job(
    config: Config, stubbed: bool, report: Callable[[str], None], environment: Mapping[str, str] | None = None
) -> Path:
    """Make the run's folder with config.yaml, placement.json and folders for logs; returns the path of config.yaml.

    `stubbed`: no role will run, so model and packages are not checked. Raises ConfigError before anything is made, also
    after many requeues.
    """
    placement, environment = plan_processes(config), environment or {}
    if not stubbed:
        check_job(config, require_browser=False)
    launches = record_launch(config, environment)
    if launches and launches[-1].message:
        report(launches[-1].message)
    with prepared_run_folder(config, placement, report, environment):
        write_launches(config.run_folder, launches)
        for node in range(placement.nodes):
            log_folder(config, node).mkdir(exist_ok=True)
        report_folder(config).mkdir(exist_ok=True)
        for old in report_folder(config).iterdir():
            old.unlink()
    return config_path(config)


def resume_overrides(path: str, overrides: list[str], environment: Mapping[str, str]) -> list[str]:
    """Overrides that make a requeued job resume from its newest checkpoint, if any.

    A job that Slurm requeued before it had prepared its run finds an earlier run of the name at most.
    """
    if environment.get("SLURM_RESTART_COUNT", "0") == "0":
        return []
    folder = parse_config(path, overrides).run_folder
    own = any(launch.slurm_job_id == environment["SLURM_JOB_ID"] for launch in read_launches(folder))
    return ["run.resume=true"] if own and latest_checkpoint_name(folder) else []


def browser_server_overrides(url: str) -> list[str]:
    """Overrides that replace a job's own browsers by those of `url`; their settings return to defaults."""
    defaults = BrowserConfig()
    return [
        f"browser.servers={url}",
        *(f"browser.{name}={json.dumps(getattr(defaults, name))}" for name in BROWSER_SERVER_SETTINGS),
    ]


def describe_processes(config: Config, stub_command: str) -> list[str]:
    """The placement as a table, and the command of every process on its node. Raises ConfigError."""
    from rich.console import Console

    placement, text = plan_processes(config), StringIO()
    print_placement(config, placement, Console(file=text, width=140))
    return text.getvalue().splitlines() + [
        f"node {node} {spec.name}: {spec.shell_command()} >> {spec.log} 2>&1"
        for node in range(placement.nodes)
        for spec in process_specs(config, placement, node, ["trainer", "rollout"], "FIRST_NODE", {}, stub_command)
    ]


class TooFewNodes(ConfigError):
    """Too few of a job's nodes passed the check."""


def bad_nodes(config: Config, nodes: Sequence[str]) -> dict[str, str]:
    """The nodes that failed a check or left no report, with the reason."""
    bad = {}
    for node in nodes:
        path = report_folder(config) / f"{node}.json"
        if not path.is_file():
            bad[node] = "its check did not finish; search the job's log for its name"
            continue
        results = json.loads(path.read_text())["results"]
        if failed := [f"{each['name']}: {each['note']}" for each in results if each["status"] == "failed"]:
            bad[node] = "; ".join(failed)
    return bad


def choose_nodes(config: Config, allocated: Sequence[str], bad: Mapping[str, str]) -> list[str]:
    """The first cluster.nodes `allocated` nodes not in `bad`. Raises ConfigError: too few, TooFewNodes: good ones."""
    good = [node for node in allocated if node not in bad]
    if len(good) >= config.cluster.nodes:
        return good[: config.cluster.nodes]
    if not bad:
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}, but the job has {len(allocated)} nodes; ask for as many with "
            "sbatch --nodes, or lower cluster.nodes"
        )
    reasons = "; ".join(f"{node}: {reason}" for node, reason in bad.items())
    raise TooFewNodes(
        f"{len(good)} of {len(allocated)} nodes passed the check, but cluster.nodes={config.cluster.nodes}: {reasons}. "
        f"Submit the job again with --exclude={','.join(bad)}, or with spare nodes"
    )
