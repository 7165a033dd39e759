"""The command line of `webrl parity`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parity(commands: Any) -> None:
    """Add the command to the parser's."""
    parity = commands.add_parser(
        "parity",
        help="check a checkpoint: transformers, Megatron and vLLM score the same prompts with images",
        description="Score the same tokens and images with transformers, with Megatron in the layout asked for and, "
        "where it is installed, with vLLM, and compare the log-probabilities. "
        "Ends with 1 beyond the tolerance, 2 for bad input, 3 if a backend failed.",
        epilog="example: webrl parity models/Qwen3-VL-4B-Instruct --tp 2 --dtype bfloat16 --samples mine.jsonl",
    )
    parity.add_argument("model", type=Path, metavar="HF_FOLDER", help="Hugging Face folder of a Qwen3-VL model")
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
        ("--layers", ("local", "transformer_engine"), "where Megatron's linear layers and norms come from"),
        ("--attention", ("sdpa", "flash"), "Megatron's attention"),
        ("--dtype", ("float32", "bfloat16"), "type of weights and activations"),
        ("--platform", ("auto", "cpu", "cuda"), "where to compute"),
    ):
        parity.add_argument(option, choices=choices, default=choices[0], help=f"{text} (default: {choices[0]})")
    parity.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference of a log-probability that passes (default: 0.001 in float32, 0.25 in bfloat16)",
    )
    parity.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    parity.add_argument(
        "--max-new-tokens", type=int, default=32, metavar="N", help="tokens of an answer sampled where none is given"
    )
    parity.add_argument(
        "--max-model-len",
        type=int,
        default=4096,
        metavar="N",
        help="tokens of a sample; the long built-in one has as many",
    )
    parity.add_argument("--seed", type=int, default=0, help="seed of the sampled answers (default: 0)")
    parity.add_argument(
        "--timeout-seconds", type=float, default=1800.0, metavar="S", help="limit of each backend (default: 1800)"
    )
    parity.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    parity.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.model.layout import ParallelSizes
    from megatron_webrl.parity.check import ParityRequest, check_parity

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
