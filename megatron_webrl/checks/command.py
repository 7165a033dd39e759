"""The command line of `webrl check`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import ConfigError

DEFAULT_CONFIG = "configs/tiny_1gpu.yaml"
PARTS = ("installation", "model", "weights", "gpu", "node")


def add_check(commands: Any) -> None:
    """Add `webrl check` and its parts to the parser; without a part it is `installation`."""
    check = commands.add_parser(
        "check", help="check the installation, a model, a weight transfer, the GPUs or a node of a job",
        description="`webrl check` alone checks the installation. Every part prints a line for each thing that it "
        "checks, and writes all lines to a JSON file on request. Exit code 1: something failed; 2: invalid input.",
    )  # fmt: skip
    parts = check.add_subparsers(required=True, metavar="PART")
    installation = _add_part(
        parts, "installation", "list what is installed here and which roles can run", _installation
    )
    installation.add_argument("--role", choices=("all", "trainer", "rollout"), default="all", help="fail for this role")
    installation.add_argument("--config", metavar="CONFIG", help="list also the packages that this configuration names")
    installation.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of CONFIG")
    _add_model(parts)
    weights = _add_part(
        parts, "weights", "send the weights of a configuration to its engines, and compare every slice", _weights
    )
    weights.add_argument("config", help="YAML file")
    weights.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    _add_gpu(parts)
    node = parts.add_parser("node", help="check a node of a job, and its network together with the other nodes")
    node.add_argument("config", type=Path, help="config.yaml in the run's folder, as `webrl node prepare` made it")
    node.add_argument("nodes", nargs="+", metavar="NODE", help="the nodes of the job, this one among them")
    node.add_argument("--first-address", required=True, metavar="ADDRESS", help="address of the first node")
    node.add_argument(
        "--min-gib-per-second", type=float, default=0.0, metavar="G", help="least GiB/s between two nodes (default: 0)"
    )
    node.set_defaults(run=_node)


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
    model.add_argument("model", type=Path, metavar="HF_FOLDER", help="folder of a Qwen3-VL or Qwen3.5 model")
    model.add_argument(
        "--samples", type=Path, metavar="FILE",
        help='JSONL, {"messages": [...], "response": "text"} a line (default: built-in samples); see docs/parity.md',
    )  # fmt: skip
    for option, text in (
        ("--tp", "Megatron's tensor-parallel size"),
        ("--pp", "Megatron's pipeline-parallel size"),
        ("--vpp", "model chunks of each pipeline stage"),
        ("--ep", "Megatron's expert-parallel size"),
        ("--vllm-tp", "vLLM's tensor-parallel size"),
    ):
        model.add_argument(option, type=int, default=1, metavar="N", help=f"{text} (default: 1)")
    for option, choices, text in (
        ("--layers", ("local", "transformer_engine"), "library of Megatron's linear layers and norms"),
        ("--attention", ("auto", "sdpa", "varlen", "flash"), "Megatron's attention"),
        ("--dtype", ("float32", "bfloat16"), "type of weights and activations"),
        ("--platform", ("auto", "cpu", "cuda"), "device to compute on"),
    ):
        model.add_argument(option, choices=choices, default=choices[0], help=f"{text} (default: {choices[0]})")
    model.add_argument(
        "--tolerance", type=float, metavar="X",
        help="largest allowed log-probability difference (default: 0.001 in float32; in bfloat16 mean and quantile are "
        "compared with the error of transformers in bfloat16, which needs the model in float32, too)",
    )  # fmt: skip
    model.add_argument("--no-vllm", action="store_true", help="skip vLLM")
    for option, default, kind, text in (
        ("--max-new-tokens", 32, int, "tokens of a sampled response"),
        ("--max-model-len", 4096, int, "limit of prompt and response in tokens; the long built-in sample reaches it"),
        ("--seed", 0, int, "seed of sampled responses"),
        ("--timeout-seconds", 1800.0, float, "time limit of each backend"),
    ):
        model.add_argument(option, type=kind, default=default, metavar="N", help=f"{text} (default: {default:g})")


def _add_gpu(parts: Any) -> None:
    from megatron_webrl.checks.gpu import SECTIONS

    gpu = _add_part(
        parts, "gpu", "prove that a machine computes, sends weights and trains as it should", _gpu,
        description="Check this machine section by section: environment, the reports of the nodes of a Slurm job, the "
        "model on one GPU against transformers, speed and memory, links between its GPUs with peers that die, and a "
        "short whole job. docs/gpu.md says what each line means.",
        epilog="example: webrl check gpu configs/8b_1node.yaml --json gpu.json",
    )  # fmt: skip
    gpu.add_argument(
        "config", nargs="?", default=DEFAULT_CONFIG, help=f"YAML file of the job (default: {DEFAULT_CONFIG})"
    )
    gpu.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    gpu.add_argument(
        "--platform", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto: model.platform; "
        "if that is auto, too, CUDA where the machine has a GPU)",
    )  # fmt: skip
    gpu.add_argument(
        "--section", action="append", choices=tuple(SECTIONS), metavar="NAME", dest="sections",
        help=f"check only this section; may be repeated: {', '.join(SECTIONS)}",
    )  # fmt: skip
    limits = ", ".join(f"{seconds:g}" for _, seconds in SECTIONS.values())
    gpu.add_argument(
        "--timeout-seconds", type=float, metavar="S", help=f"limit of each section (default: their own: {limits})"
    )
    gpu.add_argument(
        "--min-link-gib-per-second", type=float, default=0.0, metavar="X",
        help="least speed between two GPUs, GiB/s (default: half of the median of all pairs)",
    )  # fmt: skip
    gpu.add_argument(
        "--node-report", action="append", type=Path, default=[], metavar="FILE", dest="node_reports",
        help="report of `webrl check node` to include; may be repeated",
    )  # fmt: skip


def _installation(options: argparse.Namespace) -> int:
    from megatron_webrl.checks.installation import ROLES, check_installation
    from megatron_webrl.checks.report import check_json_option, report

    if options.overrides and not options.config:
        raise ConfigError(f"{options.overrides[0]!r} has no effect without --config CONFIG")
    check_json_option(options.json)
    config = parse_config(options.config, options.overrides) if options.config else None
    roles = ROLES if options.role == "all" else (options.role,)
    return report(check_installation(roles, config), options.json)


def _model(options: argparse.Namespace) -> int:
    from megatron_webrl.checks.model import ModelCheckRequest, check_model
    from megatron_webrl.checks.report import check_json_option, make_console, report
    from megatron_webrl.model.layout import ParallelSizes

    check_json_option(options.json)
    request = ModelCheckRequest(
        model=options.model,
        samples=options.samples,
        sizes=ParallelSizes(tensor=options.tp, pipeline=options.pp, virtual=options.vpp, expert=options.ep),
        layers=options.layers,
        attention=options.attention,
        dtype=options.dtype,
        platform=options.platform,
        tolerance=options.tolerance,
        max_new_tokens=options.max_new_tokens,
        max_model_len=options.max_model_len,
        vllm=not options.no_vllm,
        vllm_tensor_parallel=options.vllm_tp,
        timeout_seconds=options.timeout_seconds,
        seed=options.seed,
    )
    return report(check_model(request, make_console()), options.json)


def _weights(options: argparse.Namespace) -> int:
    from megatron_webrl.checks.report import check_json_option, make_console, report
    from megatron_webrl.checks.weights import check_weights
    from megatron_webrl.launch.validation import load_config

    check_json_option(options.json)
    return report(check_weights(load_config(options.config, options.overrides), make_console()), options.json)


def _gpu(options: argparse.Namespace) -> int:
    from megatron_webrl.checks.gpu import SECTIONS, GpuCheckRequest, check_gpu, choose_platform
    from megatron_webrl.checks.report import check_json_option, make_console, report

    check_json_option(options.json)
    if options.timeout_seconds is not None and not options.timeout_seconds > 0:
        raise ConfigError(f"--timeout-seconds={options.timeout_seconds:g} must be greater than 0")
    console, asked = make_console(), options.platform
    if asked == "auto":
        asked = parse_config(options.config, options.overrides).model.platform
    platform, cuda_problem = choose_platform(asked)
    if asked == "auto" and platform == "cpu":
        console.print("no GPU on this machine: all sections compute on its cores (--platform auto)", markup=False)
    request = GpuCheckRequest(
        config=parse_config(options.config, [*options.overrides, f"model.platform={platform}"]),
        platform=platform,
        cuda_problem=cuda_problem,
        sections=tuple(section for section in SECTIONS if section in (options.sections or SECTIONS)),
        timeout_seconds=options.timeout_seconds,
        min_link_gib_per_second=options.min_link_gib_per_second,
        node_reports=tuple(options.node_reports),
    )
    return report(check_gpu(request, console), options.json, platform=platform)


def _node(options: argparse.Namespace) -> int:
    import os
    import socket
    from contextlib import nullcontext

    from megatron_webrl.checks.node import run_node_check
    from megatron_webrl.track.run_lock import launch_of_process

    config = parse_config(options.config)
    is_first = options.nodes[0] in (os.environ.get("SLURMD_NODENAME"), socket.gethostname())
    launch = launch_of_process(config.run_folder, os.environ) if is_first else None
    with launch.locked() if launch is not None else nullcontext():
        return run_node_check(config, options.nodes, options.first_address, options.min_gib_per_second)
