"""Runs a job on this machine, which is a cluster of one node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch import gpus, run_folder
from megatron_webrl.launch.first_node import FirstNode
from megatron_webrl.launch.output import ConsoleOutput
from megatron_webrl.placement.placement import Placement, place_processes
from megatron_webrl.track.run_lock import Launch

if TYPE_CHECKING:  # it imports torch
    from megatron_webrl.launch.evaluation import CheckpointEvaluation


def run_here(
    config: Config, console: Console, evaluation: CheckpointEvaluation | None = None, weights_only: bool = False
) -> int:
    """Run a job on this machine; returns the exit code: 0 finished, 1 failed, 130 interrupted.

    `evaluation`: of a job without a trainer, with the same configuration. `weights_only`: transfer weights to the
    engines without training. Raises ConfigError for a configuration that this machine cannot run, a folder in use, and
    incomplete weights.
    """
    _check_machine(config)
    if evaluation is not None:
        run_folder.check_ended(config)  # before the checkpoint is converted
    placement = place_processes(config)
    node = FirstNode(
        config, placement, ConsoleOutput(config, console, evaluation, not weights_only), weights_only=weights_only
    )
    return node.run_job(_launch(config, placement, console, evaluation, node.scratch))


@contextmanager
def _launch(
    config: Config, placement: Placement, console: Console, evaluation: CheckpointEvaluation | None, scratch: Path
) -> Iterator[Launch]:
    """Convert the checkpoint of an evaluation, and prepare the run's folder."""
    if message := run_folder.sweep_leftovers():
        console.print(message, markup=False, soft_wrap=True)
    if message := _device_warning(config):
        console.print(message, style="yellow", markup=False, soft_wrap=True)
    if evaluation is not None and evaluation.checkpoint.is_megatron:
        path = evaluation.checkpoint.path
        with console.status(f"converting {path}") if console.is_terminal else nullcontext():
            evaluation.checkpoint.convert(scratch / "model")
        config.model = replace(config.model, path=str(scratch / "model"))
    with run_folder.prepared_run_folder(
        config, placement, lambda text: console.print(text, markup=False, soft_wrap=True)
    ) as launch:
        yield launch


def _check_machine(config: Config) -> None:
    """Raises ConfigError for a job that needs several nodes, or would compute on the cores of a machine with GPUs."""
    if config.cluster.nodes > 1:
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}, but this command runs all roles on one machine; set "
            "cluster.nodes=1 and parallel sizes to match"
        )
    wants_gpus = config.cluster.gpus_per_node and config.model.platform != "cpu"
    if wants_gpus and gpus.has_gpu() and (problem := gpus.find_cuda_problem()):
        raise ConfigError(
            f"cluster.gpus_per_node={config.cluster.gpus_per_node}, but {problem}; or set model.platform=cpu to "
            "compute on the cores"
        )


def _device_warning(config: Config) -> str:
    """What a user may not expect of the devices that model.platform=auto takes; empty if nothing."""
    if config.model.platform != "auto":
        return ""
    if config.cluster.gpus_per_node:
        return "" if gpus.has_gpu() else "no GPU on this machine: all roles compute on its cores (model.platform=auto)"
    if config.evaluation.only or not gpus.has_gpu() or gpus.find_cuda_problem():
        return ""
    return (
        "cluster.gpus_per_node=0: trainer and engines take this machine's first GPU, and neither leaves memory for the "
        "other; set cluster.gpus_per_node=1 and cluster.colocate=true (docs/checking.md)"
    )
