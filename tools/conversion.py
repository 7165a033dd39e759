"""What the two conversion tools have in common: options, progress, errors."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_webrl.model.convert.conversion import ConversionOptions, ConversionSummary
from megatron_webrl.model.convert.hf_files import DTYPE_NAMES

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
BYTE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of both directions."""
    parser.add_argument("--dtype", choices=DTYPES, help="type of the result (default: as it is stored)")
    parser.add_argument("--verify", action="store_true", help="read the result again and compare it bit for bit")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")


def make_options(arguments: argparse.Namespace) -> ConversionOptions:
    """What `add_options` took."""
    return ConversionOptions(DTYPES.get(arguments.dtype), arguments.overwrite, arguments.verify, progress_bar)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A progress bar of bytes with their speed on standard error; nothing if that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "300 MB" or "1000"; units are powers of 1000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)?", text.strip().upper())
    if not found or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB or 300MB")
    return int(float(found[1]) * BYTE_UNITS[found[2] or ""])


def run_conversion(tool: str, target: Path, convert: Callable[[], ConversionSummary]) -> int:
    """Convert and say what was written. Exit code: 2 with one line for what is refused, 130 for an interrupt."""
    try:
        summary = convert()
    except (ValueError, OSError) as error:
        print(f"{tool}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{tool}: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{target}: {summary.tensors} tensors, {summary.nbytes / 1e9:.3f} GB")
    return 0
