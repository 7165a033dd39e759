"""What is decided once for a job: its folder, its configuration, its placement, and which nodes it uses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_webrl import roles
from megatron_webrl.config import BrowserConfig, Config, ConfigError, load, read
from megatron_webrl.config_checks import OF_NODES, check_limits
from megatron_webrl.config_layout import check_layout
from megatron_webrl.config_site import check_site
from megatron_webrl.node import findings, requeue
from megatron_webrl.node.starts import log_folder, starts
from megatron_webrl.placement import Placement, place
from megatron_webrl.placement_page import describe, print_placement


def planned(path: str, overrides: list[str]) -> tuple[Config, Placement]:
    """A configuration and its placement, checked as far as no machine is needed. Raises ConfigError."""
    config = read(path, overrides)
    check_limits(config, "")
    description = describe(config)
    if description is not None:
        check_layout(config, description)
    return config, place(config)


def prepare(
    path: str,
    overrides: list[str],
    rehearse: bool,
    tell: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Make the run's folder with config.yaml, placement.json and folders for logs; returns the path of config.yaml.

    `environment`: that of a job of Slurm. A rehearsal, which starts neither trainer nor engines, needs neither
    model nor packages. Raises ConfigError before anything is made.
    """
    config, found = planned(path, overrides)
    if not rehearse:
        config = load(path, overrides)
        check_site(config, browsers=False)
    begun = requeue.begin(config, environment or {})
    if begun and begun[-1].words:
        tell(begun[-1].words)
    roles.prepare_folder(config, tell)
    requeue.write(config.run_folder, begun)
    for node in range(found.nodes):
        log_folder(config, node).mkdir(exist_ok=True)
    (config.run_folder / "placement.json").write_text(json.dumps(found.to_json(), indent=1) + "\n")
    findings.folder(config).mkdir(exist_ok=True)
    for old in findings.folder(config).iterdir():
        old.unlink()
    roles.address_file(config).unlink(missing_ok=True)
    return roles.settings_file(config)


def resuming(path: str, overrides: list[str], environment: Mapping[str, str]) -> list[str]:
    """What a job that Slurm has started again adds to its overrides: to go on from its newest checkpoint, if any."""
    if environment.get("SLURM_RESTART_COUNT", "0") == "0":
        return []
    return ["run.resume=true"] if requeue.checkpoint(read(path, overrides).run_folder) else []


def farm_overrides(url: str) -> list[str]:
    """What makes a configuration with browsers of its own one that uses a farm, whose nodes keep its other settings."""
    usual = BrowserConfig()
    return [f"browser.farm={url}", *(f"browser.{name}={json.dumps(getattr(usual, name))}" for name in OF_NODES)]


def shown(path: str, overrides: list[str], rehearse: str) -> list[str]:
    """Every process of a job: node, role, devices, cores, and the full command. Raises ConfigError."""
    from io import StringIO

    from rich.console import Console

    config, found = planned(path, overrides)
    page = StringIO()
    print_placement(config, found, Console(file=page, width=140))
    lines = page.getvalue().splitlines()
    address = f"FIRST_NODE:{config.control.port or found.control_port}"
    for node in range(found.nodes):
        for role in ("trainer", "rollout"):
            lines += [
                f"node {node} {start.name}: {start.shown()} >> {start.log} 2>&1"
                for start in starts(config, found, node, role, address, {}, rehearse)
            ]
    return lines


class TooFewNodes(ConfigError):
    """Of a job's nodes not enough are fit."""


def choose(config: Config, allocated: Sequence[str], bad: dict[str, str]) -> list[str]:
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
