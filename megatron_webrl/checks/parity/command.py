"""The command line of `webrl parity`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parity(commands: Any) -> None:
    """Add the `parity` subcommand."""
    parity = commands.add_parser(
        "parity",
        help="check a checkpoint: transformers, Megatron and vLLM score the same prompts with images",
        description="Score the same tokens and images with transformers, with Megatron in the given layout and, if "
        "installed, with vLLM, and compare the log-probabilities. "
        "Exit code 1: beyond the tolerance; 2: invalid input; 3: a backend failed.",
        epilog="example: webrl parity models/Qwen3-VL-4B-Instruct --tp 2 --dtype bfloat16 --samples mine.jsonl",
    )
    parity.add_argument("model", type=Path, metavar="HF_FOLDER", help="folder of a Qwen3-VL or Qwen3.5 model")
    parity.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help='JSONL, {"messages": [...], "response": "text"} a line (default: built-in samples); see docs/parity.md',
    )
    for option, text in (
        ("--tp", "Megatron's tensor-parallel size"),
        ("--pp", "Megatron's pipeline-parallel size"),
        ("--vpp", "model chunks of each pipeline stage"),
        ("--ep", "Megatron's expert-parallel size"),
        ("--vllm-tp", "vLLM's tensor-parallel size"),
    ):
        parity.add_argument(option, type=int, default=1, metavar="N", help=f"{text} (default: 1)")
    for option, choices, text in (
        ("--layers", ("local", "transformer_engine"), "library of Megatron's linear layers and norms"),
        ("--attention", ("auto", "sdpa", "varlen", "flash"), "Megatron's attention"),
        ("--dtype", ("float32", "bfloat16"), "type of weights and activations"),
        ("--platform", ("auto", "cpu", "cuda"), "device to compute on"),
    ):
        parity.add_argument(option, choices=choices, default=choices[0], help=f"{text} (default: {choices[0]})")
    parity.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest allowed log-probability difference (default: 0.001 in float32, 0.25 in bfloat16)",
    )
    parity.add_argument("--no-vllm", action="store_true", help="skip vLLM")
    parity.add_argument(
        "--max-new-tokens", type=int, default=32, metavar="N", help="tokens of a sampled response (default: 32)"
    )
    parity.add_argument(
        "--max-model-len",
        type=int,
        default=4096,
        metavar="N",
        help="limit of prompt and response in tokens; the long built-in sample reaches it (default: 4096)",
    )
    parity.add_argument("--seed", type=int, default=0, help="seed of sampled responses (default: 0)")
    parity.add_argument(
        "--timeout-seconds", type=float, default=1800.0, metavar="S", help="time limit of each backend (default: 1800)"
    )
    parity.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")
    parity.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.checks.parity.check import ParityRequest, check_parity
    from megatron_webrl.model.layout import ParallelSizes

    request = ParityRequest(
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
        json=options.json,
    )
    return check_parity(request, Console())
