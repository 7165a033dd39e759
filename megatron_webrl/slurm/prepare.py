"""What is decided once for a job: its folder, its configuration, its placement, and which nodes it uses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_webrl.cluster.parallel_layout import check_parallel_layout
from megatron_webrl.cluster.placement import Placement, place_processes
from megatron_webrl.cluster.placement_table import find_model_config, print_placement
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.browser_checks import BROWSER_SERVER_SETTINGS
from megatron_webrl.config.limits import check_limits
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch import role_process
from megatron_webrl.launch.task_validation import check_tasks_and_browser
from megatron_webrl.launch.validation import load_config
from megatron_webrl.preflight import node_report
from megatron_webrl.slurm import requeue
from megatron_webrl.slurm.process_specs import log_folder, process_specs


def plan_job(path: str, overrides: list[str]) -> tuple[Config, Placement]:
    """A configuration and its placement, checked as far as no machine is needed. Raises ConfigError."""
    config = parse_config(path, overrides)
    check_limits(config, "")
    description = find_model_config(config)
    if description is not None:
        check_parallel_layout(config, description)
    return config, place_processes(config)


def prepare_job(
    path: str,
    overrides: list[str],
    stubbed: bool,
    tell: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Make the run's folder with config.yaml, placement.json and folders for logs; returns the path of config.yaml.

    `environment`: that of a job of Slurm. A rehearsal, which starts neither trainer nor engines, needs neither
    model nor packages. Raises ConfigError before anything is made.
    """
    config, found = plan_job(path, overrides)
    if not stubbed:
        config = load_config(path, overrides)
        check_tasks_and_browser(config, require_browser=False)
    begun = requeue.record_launch(config, environment or {})
    if begun and begun[-1].message:
        tell(begun[-1].message)
    role_process.prepare_run_folder(config, tell)
    requeue.write_launches(config.run_folder, begun)
    for node in range(found.nodes):
        log_folder(config, node).mkdir(exist_ok=True)
    (config.run_folder / "placement.json").write_text(json.dumps(found.to_json(), indent=1) + "\n")
    node_report.report_folder(config).mkdir(exist_ok=True)
    for old in node_report.report_folder(config).iterdir():
        old.unlink()
    role_process.control_address_path(config).unlink(missing_ok=True)
    return role_process.config_path(config)


def resume_overrides(path: str, overrides: list[str], environment: Mapping[str, str]) -> list[str]:
    """What a job that Slurm has started again adds to its overrides: to go on from its newest checkpoint, if any."""
    if environment.get("SLURM_RESTART_COUNT", "0") == "0":
        return []
    return ["run.resume=true"] if requeue.latest_checkpoint_name(parse_config(path, overrides).run_folder) else []


def farm_overrides(url: str) -> list[str]:
    """What makes a configuration with browsers of its own one that uses a farm, whose nodes keep its other settings."""
    usual = BrowserConfig()
    return [
        f"browser.farm={url}",
        *(f"browser.{name}={json.dumps(getattr(usual, name))}" for name in BROWSER_SERVER_SETTINGS),
    ]


def describe_commands(path: str, overrides: list[str], stub_command: str) -> list[str]:
    """Every process of a job: node, role, devices, cores, and the full command. Raises ConfigError."""
    from io import StringIO

    from rich.console import Console

    config, found = plan_job(path, overrides)
    page = StringIO()
    print_placement(config, found, Console(file=page, width=140))
    lines = page.getvalue().splitlines()
    address = f"FIRST_NODE:{config.control.port or found.control_port}"
    for node in range(found.nodes):
        for role in ("trainer", "rollout"):
            lines += [
                f"node {node} {start.name}: {start.shell_command()} >> {start.log} 2>&1"
                for start in process_specs(config, found, node, role, address, {}, stub_command)
            ]
    return lines


class TooFewNodes(ConfigError):
    """Of a job's nodes not enough are fit."""


def choose_nodes(config: Config, allocated: Sequence[str], bad: dict[str, str]) -> list[str]:
    """The first cluster.nodes of the allocated nodes that are not bad.

    Raises ConfigError naming what is missing, TooFewNodes where other nodes would do.
    """
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
        f"{len(good)} of {len(allocated)} nodes are fit for a job of cluster.nodes={config.cluster.nodes}: {reasons}. "
        f"Submit it again with --exclude={','.join(bad)}, or with more nodes than it needs"
    )
