"""`webrl check gpu`: prove section by section that a machine computes, sends weights and trains as it should."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from megatron_webrl.checks.processes import run_processes
from megatron_webrl.checks.report import CheckResult, failed, skipped
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.placement.placement import place_processes

SECTIONS: dict[str, tuple[str, float]] = {
    "environment": ("gpu:check_environment", 300.0),
    "nodes": ("gpu:read_nodes", 60.0),
    "one GPU": ("gpu_model:check", 900.0),
    "speed": ("gpu_speed:check", 300.0),
    "links": ("gpu_links:check", 600.0),
    "engine": ("gpu_engine:check", 1200.0),
}
"""Sections of `check gpu`: function and limit in seconds; those that take long last."""
GPU_SECTIONS = ("one GPU", "speed", "links", "engine")  # compute on GPUs, if the platform is CUDA


@dataclass(frozen=True)
class GpuCheckRequest:
    """Options of `webrl check gpu`."""

    config: Config  # of the machine (cluster.*) and of the job of the section "engine"
    platform: str  # "cpu" or "cuda"
    cuda_problem: str = ""  # why torch cannot use the GPUs of this machine; fails the driver, skips GPU_SECTIONS
    sections: Sequence[str] = tuple(SECTIONS)
    timeout_seconds: float | None = None  # of each section; None: its own
    min_link_gib_per_second: float = 0.0  # least speed between two GPUs
    node_reports: Sequence[Path] = ()  # of `webrl check node`


def choose_platform(asked: str) -> tuple[str, str]:
    """The platform for "auto", "cpu" or "cuda", and why torch cannot use CUDA although it is chosen."""
    from megatron_webrl.util import cuda_driver

    problem = "" if asked == "cpu" else cuda_driver.find_cuda_problem()
    if asked == "cpu" or (asked == "auto" and problem and not cuda_driver.has_gpu() and not cuda_driver.lists_gpus()):
        return "cpu", ""
    return "cuda", problem


def check_gpu(request: GpuCheckRequest, console: Console) -> list[CheckResult]:
    """Run the sections one after the other, each in a process of its own."""
    results: list[CheckResult] = []
    for section in request.sections:
        if request.cuda_problem and section in GPU_SECTIONS:
            not_run = skipped if "environment" in request.sections else failed  # one line fails with the reason
            found = [not_run(section, "all", request.cuda_problem)]
        else:
            found = _run_section(request, section, console)
        bad = sum(each.status == "failed" for each in found)
        outcome = f"{bad} of {len(found)} failed" if bad else f"{len(found)} checked"
        console.print(f"{section}: {outcome}", highlight=False, markup=False)
        results += found
    return results


def _run_section(request: GpuCheckRequest, section: str, console: Console) -> list[CheckResult]:
    """The results of a section; a failure if its process dies, or takes longer than its limit."""
    function, seconds = SECTIONS[section]
    seconds = request.timeout_seconds or seconds
    with console.status(f"{section} ...") as status:
        outcome = run_processes(
            function, request, seconds, progress=lambda last: status.update(f"{section}: {getattr(last, 'name', '')}")
        )
    results: list[CheckResult] = outcome.results[0]
    if outcome.error:
        results.append(failed(section, "its process", f"{outcome.error} (--timeout-seconds sets the limit)"))
        console.print(outcome.log, markup=False, style="dim")
    return results


def check_environment(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """What is installed, and what a node of a job checks by itself; what is a warning there is a failure here."""
    from megatron_webrl.checks.installation import check_installation
    from megatron_webrl.checks.node import CHECKS, check_locally

    section, config = "environment", request.config
    if request.cuda_problem:
        yield failed(section, "driver", request.cuda_problem)
    yield from check_installation(config=config)
    try:
        placement = place_processes(config)
    except ConfigError as error:
        yield failed(section, "placement", str(error))
        return
    if request.platform == "cpu":
        config = replace(config, cluster=replace(config.cluster, gpus_per_node=0, gpu_numa=[]))
    for each in check_locally(section, config, placement, [name for name in CHECKS if name != "software"]):
        yield replace(each, status="failed") if each.note else each


def read_nodes(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """The lines of the nodes' reports of a Slurm job (launch/slurm/gpu_check.sh)."""
    if not request.node_reports:
        yield skipped("nodes", "links between nodes", "submit launch/slurm/gpu_check.sh to two nodes")
    for path in request.node_reports:
        try:
            for fields in json.loads(path.read_text())["results"]:
                fields.pop("ratio")
                each = CheckResult(**fields)
                yield replace(each, section="nodes", name=f"{each.section}: {each.name}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield failed("nodes", path.stem, f"{path} holds no report of a node: {type(error).__name__}: {error}")
