"""The command line of `webrl check`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import ConfigError

DEFAULT_CONFIG = "configs/tiny_1gpu.yaml"
PARTS = ("installation", "model", "weights", "gpu", "job", "node")
MODEL_SIZES = {
    "tp": ("trainer.tensor_parallel", "Megatron's tensor-parallel size"),
    "pp": ("trainer.pipeline_parallel", "Megatron's pipeline-parallel size"),
    "vpp": ("trainer.virtual_pipeline", "model chunks of each pipeline stage"),
    "ep": ("trainer.expert_parallel", "Megatron's expert-parallel size"),
    "vllm-tp": ("rollout.tensor_parallel", "vLLM's tensor-parallel size"),
}
MODEL_CHOICES = {
    "layers": ("trainer.layers", ("local", "transformer_engine"), "library of Megatron's linear layers and norms"),
    "attention": ("trainer.attention", ("auto", "sdpa", "varlen", "flash"), "Megatron's attention"),
    "dtype": ("model.dtype", ("float32", "bfloat16"), "type of weights and activations"),
    "head-dtype": ("model.head_dtype", ("model", "float32"), "type of Megatron's and vLLM's logits"),
    "platform": ("model.platform", ("auto", "cpu", "cuda"), "device to compute on"),
}
"""Options of `check model`, with the setting that each one makes."""
REPORTED = ("platform", "sections", "quick", "timeout_seconds")
"""Fields of GpuCheckRequest that the report of `check gpu` holds, for `check job`."""


def add_check(commands: Any) -> None:
    """Add `webrl check` and its parts to the parser; without a part it is `installation`."""
    check = commands.add_parser(
        "check", help="check the installation, a model, a weight transfer, the GPUs or a node of a job",
        description="`webrl check` alone checks the installation. Every part prints a line for each thing that it "
        "checks, and writes all lines to a JSON file on request. Exit code 1: something failed; 2: invalid input.",
    )  # fmt: skip
    parts = check.add_subparsers(required=True, metavar="PART")
    part = _add_part(parts, "installation", "list what is installed here and which roles can run", _installation)
    part.add_argument("--role", choices=("all", "trainer", "rollout"), default="all", help="fail for this role")
    part.add_argument("--config", metavar="CONFIG", help="list also the packages that this configuration names")
    part.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of CONFIG")
    _add_model(parts)
    text = "send the weights of a configuration to its engines, and compare every slice"
    part = _add_part(parts, "weights", text, _weights)
    part.add_argument("config", help="YAML file")
    part.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    _add_gpu(parts)
    part = parts.add_parser("job", help="of gpu_check.sh: watch the short job of Slurm, and add it to the report")
    part.add_argument("config", type=Path, help="what `check gpu --job-file` has written")
    part.add_argument("report", type=Path, help="what `check gpu --json` has written")
    part.set_defaults(run=_job)
    part = parts.add_parser("node", help="check a node of a job, and its network together with the other nodes")
    part.add_argument("config", type=Path, help="config.yaml in the run's folder, as `webrl node prepare` made it")
    part.add_argument("nodes", nargs="+", metavar="NODE", help="the nodes of the job, this one among them")
    part.add_argument("--first-address", required=True, metavar="ADDRESS", help="address of the first node")
    text = "least GiB/s between two nodes (default: 0)"
    part.add_argument("--min-gib-per-second", type=float, default=0.0, metavar="G", help=text)
    part.set_defaults(run=_node)


def with_part(arguments: list[str]) -> list[str]:
    """`webrl check [options]` is `webrl check installation [options]`."""
    named = len(arguments) > 1 and arguments[1] in (*PARTS, "-h", "--help")
    return arguments if arguments[:1] != ["check"] or named else ["check", "installation", *arguments[1:]]


def _add_part(parts: Any, name: str, text: str, run: Any, **description: str) -> argparse.ArgumentParser:
    part: argparse.ArgumentParser = parts.add_parser(name, help=text, **description)
    part.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE, to attach to an issue")
    part.set_defaults(run=run)
    return part


def _add_model(parts: Any) -> None:
    model = _add_part(
        parts, "model", "check a checkpoint: transformers, Megatron and vLLM score the same prompts", _model,
        description="Score the same tokens and images with transformers, with Megatron in the given layout and, if "
        "installed, with vLLM, and compare the log-probabilities.",
        epilog="example: webrl check model models/Qwen3-VL-4B-Instruct --tp 2 --dtype bfloat16 --samples mine.jsonl",
    )  # fmt: skip
    model.add_argument("model", metavar="HF_FOLDER", help="folder of a Qwen3-VL or Qwen3.5 model")
    text = 'JSONL, {"messages": [...], "response": "text"} a line (default: built-in samples); see docs/checking.md'
    model.add_argument("--samples", type=Path, metavar="FILE", help=text)
    for option, (_, text) in MODEL_SIZES.items():
        model.add_argument(f"--{option}", type=int, default=1, metavar="N", help=f"{text} (default: 1)")
    for option, (_, choices, text) in MODEL_CHOICES.items():
        model.add_argument(f"--{option}", choices=choices, default=choices[0], help=f"{text} (default: {choices[0]})")
    model.add_argument(
        "--tolerance", type=float, metavar="X",
        help="largest allowed log-probability difference (default: 0.001 in float32; in bfloat16 mean and quantile are "
        "compared with the error of transformers in bfloat16, which needs the model in float32, too)",
    )  # fmt: skip
    model.add_argument("--gradients", action="store_true", help="compare the gradients of all weights, too")
    model.add_argument("--no-vllm", action="store_true", help="skip vLLM")
    text = "limit of prompt and response in tokens; the long built-in sample reaches it (default: 4096)"
    model.add_argument("--max-model-len", type=int, default=4096, metavar="N", help=text)
    text = "time limit of each backend (default: 1800)"
    model.add_argument("--timeout-seconds", type=float, default=1800.0, metavar="S", help=text)


def _add_gpu(parts: Any) -> None:
    from megatron_webrl.checks.gpu import SECTIONS

    gpu = _add_part(
        parts, "gpu", "prove that a machine computes, sends weights and trains as it should", _gpu,
        description="Check this machine section by section: environment, the reports of the nodes of a Slurm job, "
        "layers of the model on one GPU against transformers, links between its GPUs, and a short whole job, which "
        "survives a killed rank. On a Slurm cluster launch/slurm/gpu_check.sh runs it. docs/checking.md says what each "
        "line means.",
        epilog="example: webrl check gpu configs/8b_1node.yaml --json gpu.json",
    )  # fmt: skip
    text = f"YAML file of the job (default: {DEFAULT_CONFIG})"
    gpu.add_argument("config", nargs="?", default=DEFAULT_CONFIG, help=text)
    gpu.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    text = "device (default: auto: model.platform; if that is auto, too, CUDA where the machine has a GPU)"
    gpu.add_argument("--platform", choices=("auto", "cpu", "cuda"), default="auto", help=text)
    text = f"check only this section; may be repeated: {', '.join(SECTIONS)}"
    gpu.add_argument("--section", action="append", choices=tuple(SECTIONS), metavar="NAME", dest="sections", help=text)
    text = "in a few minutes: two random layers in model and job, and a job without checkpoint, kill and evaluation"
    gpu.add_argument("--quick", action="store_true", help=text)
    limits = ", ".join(f"{seconds:g}" for _, seconds in SECTIONS.values() if seconds)
    text = f"limit of each section (default: {limits}; of the job: 6 * run.startup_timeout_seconds)"
    gpu.add_argument("--timeout-seconds", type=float, metavar="S", help=text)
    text = "least speed between two GPUs, GiB/s (default: half of the median of all pairs)"
    gpu.add_argument("--min-link-gib-per-second", type=float, default=0.0, metavar="X", help=text)
    text = "report of `webrl check node` to include; may be repeated"
    gpu.add_argument("--node-report", action="append", type=Path, default=[], metavar="FILE", help=text)
    text = "write the configuration of the short job to FILE, for Slurm to run it"
    gpu.add_argument("--job-file", type=Path, metavar="FILE", help=text)


def _check_options(options: argparse.Namespace) -> None:
    """Refuse a file that cannot be written, and a limit of no time. Raises ConfigError."""
    from megatron_webrl.checks.report import check_report_path

    check_report_path("--json", options.json)
    seconds = getattr(options, "timeout_seconds", None)
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"--timeout-seconds={seconds:g} must be greater than 0")


def _installation(options: argparse.Namespace) -> int:
    from megatron_webrl.checks.installation import ROLES, check_installation
    from megatron_webrl.checks.report import report

    if options.overrides and not options.config:
        raise ConfigError(f"{options.overrides[0]!r} has no effect without --config CONFIG")
    _check_options(options)
    config = parse_config(options.config, options.overrides) if options.config else None
    return report(check_installation(ROLES if options.role == "all" else (options.role,), config), options.json)


def _model(options: argparse.Namespace) -> int:
    from megatron_webrl.checks.model import ModelCheckRequest, check_model
    from megatron_webrl.checks.report import make_console, report

    _check_options(options)
    for option in MODEL_SIZES:
        if (size := getattr(options, option.replace("-", "_"))) < 1:
            raise ConfigError(f"--{option}={size} must be at least 1")
    settings = {option: setting for option, (setting, *_) in {**MODEL_SIZES, **MODEL_CHOICES}.items()}
    values = {setting: getattr(options, option.replace("-", "_")) for option, setting in settings.items()}
    config = parse_config(None, [f"{setting}={value}" for setting, value in values.items()])
    config.model.path, config.run.startup_timeout_seconds = options.model, options.timeout_seconds
    request = ModelCheckRequest(
        config, options.samples, options.max_model_len, options.tolerance, options.gradients, not options.no_vllm
    )
    return report(check_model(request, make_console()), options.json)


def _weights(options: argparse.Namespace) -> int:
    from megatron_webrl.checks.jobs import check_weights
    from megatron_webrl.checks.report import make_console, report
    from megatron_webrl.launch.validation import load_config

    _check_options(options)
    return report(check_weights(load_config(options.config, options.overrides), make_console()), options.json)


def _gpu(options: argparse.Namespace) -> int:
    from megatron_webrl.checks.gpu import SECTIONS, check_gpu, choose_platform, describe_pass
    from megatron_webrl.checks.report import GpuCheckRequest, check_report_path, make_console, report

    _check_options(options)
    if not options.min_link_gib_per_second >= 0:
        raise ConfigError(f"--min-link-gib-per-second={options.min_link_gib_per_second:g} must be at least 0")
    check_report_path("--job-file", options.job_file)
    if options.job_file:
        options.job_file.unlink(missing_ok=True)  # of an earlier check
    console, config = make_console(), parse_config(options.config, options.overrides)
    asked = config.model.platform if options.platform == "auto" else options.platform
    platform, cuda_problem = choose_platform(asked)
    if asked == "auto" and platform == "cpu":
        console.print("no GPU on this machine: all sections compute on its cores (--platform auto)", markup=False)
    request = GpuCheckRequest(
        config=replace(config, model=replace(config.model, platform=platform)),
        platform=platform,
        cuda_problem=cuda_problem,
        sections=tuple(section for section in SECTIONS if section in (options.sections or SECTIONS)),
        timeout_seconds=options.timeout_seconds,
        min_link_gib_per_second=options.min_link_gib_per_second,
        node_reports=tuple(options.node_report),
        quick=options.quick,
        job_file=options.job_file,
    )
    results, header = check_gpu(request, console), {name: getattr(request, name) for name in REPORTED}
    follows = request.job_file is not None and request.job_file.exists()
    return report(results, options.json, "" if follows else describe_pass(request, results), **header)


def _job(options: argparse.Namespace) -> int:
    from megatron_webrl.checks.gpu import check_gpu, describe_pass
    from megatron_webrl.checks.report import GpuCheckRequest, make_console, read_results, report

    config = parse_config(options.config)
    try:
        fields, results = json.loads(options.report.read_text()), read_results(options.report)
        header = {name: fields[name] for name in REPORTED}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{options.report} is not a report of `webrl check gpu --json`: {error!r}") from None
    request = GpuCheckRequest(config, **header)
    results += check_gpu(replace(request, sections=("job",), slurm_job=True), make_console())
    return report(results, options.report, describe_pass(request, results), **header)


def _node(options: argparse.Namespace) -> int:
    """Returns 0 for a bad node, too: `webrl node choose` excludes it."""
    from megatron_webrl.checks.node import check_node, describe_node
    from megatron_webrl.track.run_lock import launch_of_process

    config = parse_config(options.config)
    names = [name for name in (os.environ.get("SLURMD_NODENAME"), socket.gethostname()) if name]
    launch = launch_of_process(config.run_folder, os.environ) if options.nodes[0] in names else None
    with launch.locked() if launch is not None else nullcontext():
        results = check_node(config, names[0], options.nodes, options.first_address, options.min_gib_per_second)
    sys.stdout.write(f"node {names[0]} {describe_node(results)}\n")
    if multiprocessing.active_children():  # a call of a hung GPU's driver cannot be killed, nor waited for
        sys.stdout.flush()
        os._exit(0)
    return 0
