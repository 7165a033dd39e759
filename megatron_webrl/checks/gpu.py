"""`webrl check gpu`: prove section by section that a machine computes, sends weights and trains as it should."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_webrl.checks.processes import NOT_FINISHED, run_processes
from megatron_webrl.checks.report import CheckResult, GpuCheckRequest, failed, read_results, skipped
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.trainer import TrainerConfig
from megatron_webrl.placement.placement import place_processes

SECTIONS: dict[str, tuple[str, float]] = {
    "environment": ("gpu:check_environment", 600.0),  # a cold file system reads 10 GB of packages
    "nodes": ("gpu:read_nodes", 60.0),
    "model": ("gpu:check_layers", 1200.0),  # kernels are compiled
    "links": ("network:check_links", 1200.0),  # 28 pairs of 8 GPUs, each in new processes
    "job": ("jobs:check_job", 0.0),  # GpuCheckRequest.job_seconds
}
"""Sections of `check gpu`: function and limit in seconds."""
LAYERS, QUICK_LAYERS = 4, 2  # of the random model; linear attention needs the 4, one of them with full attention
GPU_SECTIONS = ("model", "links", "job")  # compute on GPUs, if the platform is CUDA


def choose_platform(asked: str) -> tuple[str, str]:
    """The platform for "auto", "cpu" or "cuda", and why torch cannot use CUDA although it is chosen."""
    from megatron_webrl.launch import gpus

    if asked == "cpu" or (asked == "auto" and not gpus.has_gpu()):
        return "cpu", ""
    return "cuda", gpus.find_cuda_problem()


def check_gpu(request: GpuCheckRequest, console: Console) -> list[CheckResult]:
    """Run the sections one after the other, each in a process of its own: a crash or a hang is a failed line."""
    results: list[CheckResult] = []
    for section in request.sections:
        if request.cuda_problem and section in GPU_SECTIONS:
            not_run = skipped if "environment" in request.sections else failed  # one line fails with the reason
            results.append(not_run(section, "all", request.cuda_problem))
            continue
        function, limit = SECTIONS[section]
        seconds = request.job_seconds if section == "job" else request.timeout_seconds or limit
        with console.status(f"{section} ..."):
            [outcome] = run_processes(f"{__package__}.{function}", [request], seconds)
        results += outcome.results
        if outcome.error:
            hint = " (--timeout-seconds sets the limit)" if outcome.error.startswith(NOT_FINISHED) else ""
            results.append(failed(section, "its process", outcome.error + hint))
            console.print(outcome.log, markup=False, style="dim")
        console.print(f"{section}: {len(outcome.results)} checked", highlight=False, markup=False)
    return results


def describe_pass(request: GpuCheckRequest, results: Sequence[CheckResult]) -> str:
    """What a pass of the sections that ran means, and what it does not mean, in one line."""
    shown = {
        "environment": "packages, driver and limits fit",
        "nodes": "the nodes reach each other",
        "model": f"Megatron computes {'two' if request.quick else 'four'} random layers as transformers does",
        "links": f"{'processes' if request.platform == 'cpu' else 'the GPUs'} of this machine reach each other",
        "job": "a short job trains and updates its engines, which give tokens the trainer's log-probabilities"
        + ("" if request.quick else ", survives a killed rank, resumes from a checkpoint and evaluates"),
    }
    not_shown = ["that a model learns", "that a job lasts for days", "that it is fast"]
    not_shown += ["that the whole model fits and starts, or a checkpoint is written"] if request.quick else []
    not_shown += ["anything of GPUs, as it ran on cores"] if request.platform == "cpu" else []
    ran = {each.section for each in results if each.status != "skipped"}
    left = [section for section in SECTIONS if section not in ran]
    not_shown += [f"what the sections left out check ({', '.join(left)})"] if left else []
    means = "; ".join(shown[section] for section in request.sections if section in ran)
    means = means or "nothing, as no section ran"
    return f"A pass means: {means}. It does not mean: {'; '.join(not_shown)}."


def check_environment(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """What is installed, and what a node of a job checks by itself; what is a warning there is a failure here."""
    from megatron_webrl.checks.installation import check_installation
    from megatron_webrl.checks.node import check_locally

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
        config = replace(config, cluster=replace(config.cluster, gpus_per_node=0))
    for each in check_locally(section, config, placement, without="software"):
        yield replace(each, status="failed") if each.note else each


def read_nodes(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """The lines of the nodes' reports of a Slurm job (launch/slurm/gpu_check.sh)."""
    if not request.node_reports:
        yield skipped("nodes", "links between nodes", "submit launch/slurm/gpu_check.sh to two nodes")
    for path in request.node_reports:
        try:
            for each in read_results(path):
                yield replace(each, section="nodes", name=f"{each.section}: {each.name}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield failed("nodes", path.stem, f"{path} holds no report of a node: {type(error).__name__}: {error}")


def check_layers(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """Random layers as wide as those of the configured model, on one GPU: log-probabilities and gradients."""
    from megatron_webrl.checks.model import ModelCheckRequest, check_model

    kernels = {name: getattr(request.config.trainer, name) for name in ("layers", "attention", "merge_prefixes")}
    with tempfile.TemporaryDirectory(prefix="webrl-check-gpu-") as name:
        try:
            write_layers(request.config, Path(name) / "model", QUICK_LAYERS if request.quick else LAYERS)
            model = replace(request.config.model, path=f"{name}/model", platform=request.platform)
            config = replace(request.config, model=model, trainer=TrainerConfig(**kernels))
            longest = min(4096, config.rollout.max_model_len)
            small = ModelCheckRequest(config, max_model_len=longest, gradients=True, vllm=False)
            yield from check_model(small, Console(file=io.StringIO()))
        except (ConfigError, ValueError) as error:
            yield failed("model", "layers", f"{error}; give a CONFIG whose model is here")


def write_layers(job: Config, folder: Path, layers: int) -> None:
    """Write a random model like that of `job`, but with so many layers if they suffice. Raises ConfigError."""
    import torch
    from safetensors.torch import save_file

    from megatron_webrl.model.hf_config import has_experts, has_linear_attention, load_hf_config, read_model_config
    from megatron_webrl.util import torchvision_shim

    source = Path(job.model.path)
    description = read_model_config(source)
    torchvision_shim.install()
    from transformers import AutoModelForImageTextToText

    config = load_hf_config(source)
    if has_linear_attention(description):
        layers = max(layers, LAYERS)
        config.text_config.layer_types = config.text_config.layer_types[:layers]
    config.text_config.num_hidden_layers = min(layers, config.text_config.num_hidden_layers)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, job.model.dtype))
    model.save_pretrained(folder)
    if has_linear_attention(description) and has_experts(description):
        # transformers writes each expert alone, released folders one tensor for all.
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
