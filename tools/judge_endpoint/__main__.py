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

from megatron_webrl.control.child_process import die_with_parent
from tools.arguments import bounded_number
from tools.judge_endpoint.faults import FAULTS, parse_faults
from tools.judge_endpoint.oracle import load_oracle
from tools.judge_endpoint.server import MODEL, EndpointOptions, serve_endpoint


def main() -> int:
    """Serve until SIGINT, SIGTERM, or the end of the parent process. Exit code 2: bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.judge_endpoint",
        description="An OpenAI-compatible endpoint whose verdicts come from an oracle.",
    )
    parser.add_argument("--port", type=int, default=0, help="port of 127.0.0.1 (default: 0, any free one)")
    parser.add_argument(
        "--oracle", default="tools.judge_endpoint.oracle:TextOracle", metavar="MODULE:FACTORY",
        help="what decides (default: %(default)s, which compares texts)",
    )  # fmt: skip
    parser.add_argument(
        "--faults", default="0", metavar="RATES",
        help=f"share of faulty responses, such as 0.3, or by kind, such as hang=0.1,empty=0.1: {', '.join(FAULTS)}",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--latency", type=bounded_number(float, 0), default=0.0, help="seconds of a response")
    parser.add_argument(
        "--retry-after", type=bounded_number(float, 0), default=1.0, help="seconds, of a response with status 429"
    )
    parser.add_argument("--no-schemas", action="store_true", help="refuse response_format")
    parser.add_argument("--address-file", type=Path, metavar="FILE", help="receives {url, model} once it listens")
    options = parser.parse_args()
    try:
        served = EndpointOptions(
            load_oracle(options.oracle), parse_faults(options.faults), options.seed, options.latency,
            options.retry_after, schemas=not options.no_schemas,
        )  # fmt: skip
        die_with_parent(signal.SIGTERM)
        asyncio.run(_serve(served, options.port, options.address_file))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"judge_endpoint: {error}\n")
        return 2
    return 0


async def _serve(served: EndpointOptions, port: int, address: Path | None) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serve_endpoint(served, port) as (url, _):
        if address:
            temporary = address.with_name(f".{address.name}.{os.getpid()}")
            temporary.write_text(json.dumps({"url": url, "model": MODEL}))
            temporary.replace(address)
        print(url, flush=True)
        await ended.wait()


if __name__ == "__main__":
    sys.exit(main())
