"""Command line.

python -m tools.judge_endpoint --port 0 --oracle tools.judge_endpoint.oracle:TextOracle --address-file endpoint.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.child_process import die_with_parent
from tools.arguments import bounded_number
from tools.judge_endpoint.faults import FAULTS, parse_faults
from tools.judge_endpoint.oracle import load_oracle
from tools.judge_endpoint.server import MODEL, EndpointOptions, serve_endpoint


def main() -> int:
    """Serve until SIGINT, SIGTERM, or the end of the parent process. Exit code 2: bad input."""
    options = _parser().parse_args()
    try:
        key = os.environ.get(options.key_variable, "") if options.key_variable else ""
        if options.key_variable and not key:
            raise ValueError(f"--key-variable={options.key_variable} is not set")
        served = EndpointOptions(
            oracle=load_oracle(options.oracle), faults=parse_faults(options.faults), seed=options.seed,
            latency=options.latency, retry_after=options.retry_after, schemas=not options.no_schemas, key=key,
            prompts=options.prompts,
        )  # fmt: skip
        if not options.keep_running:
            die_with_parent(signal.SIGTERM)
        asyncio.run(_serve(served, options))
    except (ValueError, ConfigError, OSError) as error:
        sys.stderr.write(f"judge_endpoint: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.judge_endpoint",
        description="An OpenAI-compatible endpoint whose verdicts come from an oracle.",
    )
    seconds = bounded_number(float, 0)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: 0, any free one)")
    parser.add_argument(
        "--oracle", default="tools.judge_endpoint.oracle:TextOracle", metavar="MODULE:FACTORY",
        help="what decides (default: %(default)s, which compares texts)",
    )  # fmt: skip
    parser.add_argument(
        "--faults", default="0", metavar="RATES",
        help=f"share of faulty responses, such as 0.3, or by kind, such as hang=0.1,empty=0.1: {', '.join(FAULTS)}",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--latency", type=seconds, default=0.0, metavar="S", help="seconds of a response")
    parser.add_argument("--retry-after", type=seconds, default=1.0, metavar="S", help="seconds, with status 429")
    parser.add_argument("--no-schemas", action="store_true", help="refuse response_format with status 400")
    parser.add_argument("--key-variable", metavar="NAME", help="environment variable with the required key")
    parser.add_argument("--prompts", default="configs/judge", metavar="FOLDER", help="judge.prompts of the clients")
    parser.add_argument("--address-file", type=Path, metavar="FILE", help="receives {url, model} once it listens")
    parser.add_argument("--keep-running", action="store_true", help="outlive the parent process")
    return parser


async def _serve(served: EndpointOptions, options: argparse.Namespace) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serve_endpoint(served, options.host, options.port) as (url, _):
        if options.address_file:
            temporary = options.address_file.with_name(f".{options.address_file.name}.{os.getpid()}")
            temporary.write_text(json.dumps({"url": url, "model": MODEL}))
            temporary.replace(options.address_file)
        print(url, flush=True)
        await ended.wait()


if __name__ == "__main__":
    sys.exit(main())
