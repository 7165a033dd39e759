"""Preparation of a job, once on its first node: run folder, configuration, placement, and choice of nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from megatron_webrl.config.browser import BROWSER_SERVER_SETTINGS, BrowserConfig
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.launch import role_process
from megatron_webrl.launch.node_reports import report_folder
from megatron_webrl.launch.slurm import requeue
from megatron_webrl.launch.slurm.process_specs import log_folder, process_specs
from megatron_webrl.launch.task_validation import check_evaluators, check_tasks_and_browser
from megatron_webrl.launch.validation import load_config
from megatron_webrl.placement.parallel_layout import check_parallel_layout
from megatron_webrl.placement.placement import Placement, place_processes
from megatron_webrl.placement.placement_table import find_model_config, print_placement
from megatron_webrl.util import atomic_file


def plan_job(path: str, overrides: list[str]) -> tuple[Config, Placement]:
    """Read a configuration and place its processes, without looking at any machine. Raises ConfigError."""
    config = parse_config(path, overrides)
    return config, plan_processes(config)


def plan_processes(config: Config) -> Placement:
    """Place the processes of a configuration, without looking at any machine. Raises ConfigError."""
    check_sections(config)
    description = find_model_config(config)
    if description is not None:
        check_parallel_layout(config, description)
    return place_processes(config)


def prepare_job(
    path: str,
    overrides: list[str],
    stubbed: bool,
    report: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Make the run's folder with config.yaml, placement.json and folders for logs; returns the path of config.yaml.

    `stubbed`: no role will run, so model and packages are not checked. Raises ConfigError before anything is made.
    """
    config, placement = plan_job(path, overrides)
    if not stubbed:
        config = load_config(path, overrides)
        check_tasks_and_browser(config, require_browser=False)
        check_evaluators(config)
    return make_job_folder(config, placement, report, environment or {})


def make_job_folder(
    config: Config, placement: Placement, report: Callable[[str], None], environment: Mapping[str, str]
) -> Path:
    """Make the run's folder of a job; returns the path of its config.yaml. Raises ConfigError after many requeues."""
    launches = requeue.record_launch(config, environment)
    if launches and launches[-1].message:
        report(launches[-1].message)
    role_process.prepare_run_folder(config, report, environment)
    requeue.write_launches(config.run_folder, launches)
    for node in range(placement.nodes):
        log_folder(config, node).mkdir(exist_ok=True)
    atomic_file.write_json(config.run_folder / "placement.json", placement.to_json(), indent=1)
    report_folder(config).mkdir(exist_ok=True)
    for old in report_folder(config).iterdir():
        old.unlink()
    role_process.control_address_path(config).unlink(missing_ok=True)
    return role_process.config_path(config)


def resume_overrides(path: str, overrides: list[str], environment: Mapping[str, str]) -> list[str]:
    """Overrides that make a requeued job resume from its newest checkpoint, if any.

    A job that Slurm requeued before it had prepared its run finds an earlier run of the name at most.
    """
    if environment.get("SLURM_RESTART_COUNT", "0") == "0":
        return []
    folder = parse_config(path, overrides).run_folder
    own = any(launch.slurm_job_id == environment["SLURM_JOB_ID"] for launch in requeue.read_launches(folder))
    return ["run.resume=true"] if own and requeue.latest_checkpoint_name(folder) else []


def farm_overrides(url: str) -> list[str]:
    """Overrides that replace a job's own browsers by a farm; settings of browser servers return to their defaults."""
    defaults = BrowserConfig()
    return [
        f"browser.farm={url}",
        *(f"browser.{name}={json.dumps(getattr(defaults, name))}" for name in BROWSER_SERVER_SETTINGS),
    ]


def describe_commands(path: str, overrides: list[str], stub_command: str) -> list[str]:
    """Every process of a job: node, role, devices, cores, and the full command. Raises ConfigError."""
    config, placement = plan_job(path, overrides)
    return describe_processes(config, placement, stub_command)


def describe_processes(config: Config, placement: Placement, stub_command: str) -> list[str]:
    """The placement as a table, and the command of every process on its node."""
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    print_placement(config, placement, Console(file=text, width=140))
    lines = text.getvalue().splitlines()
    for node in range(placement.nodes):
        for role in ("trainer", "rollout"):
            lines += [
                f"node {node} {spec.name}: {spec.shell_command()} >> {spec.log} 2>&1"
                for spec in process_specs(config, placement, node, role, "FIRST_NODE", {}, stub_command)
            ]
    return lines


class TooFewNodes(ConfigError):
    """Too few of a job's nodes passed the check."""


def choose_nodes(
    config: Config, allocated: Sequence[str], bad: Mapping[str, str], slow: Collection[str] = ()
) -> list[str]:
    """The first cluster.nodes `allocated` nodes not in `bad`, in their order; `slow` ones only if others are too few.

    Raises ConfigError: too few, TooFewNodes: too few good ones.
    """
    good = [node for node in allocated if node not in bad]
    if len(good) >= config.cluster.nodes:
        preferred = sorted(good, key=lambda node: node in slow)[: config.cluster.nodes]
        return [node for node in good if node in preferred]
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
