"""Runs the sections one after the other, each in a process of its own, within one limit of time, and reports."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_webrl import __version__
from megatron_webrl.checks.gpu import section_process
from megatron_webrl.checks.gpu.request import GPU_SECTIONS, GpuCheckRequest
from megatron_webrl.checks.gpu.results import CheckResult, failed, print_results, skipped, write_report
from megatron_webrl.launch import run_folder
from megatron_webrl.util import child_process

POLL_SECONDS = 0.2
LOG_TAIL = 20  # lines of a section's log that are shown if it dies


def run_check(request: GpuCheckRequest, console: Console, report: Path | None, command: Sequence[str]) -> int:
    """Run all sections, print the table, write the report; returns 1 if anything failed. Raises OSError."""
    started, results = time.monotonic(), []
    for section in request.sections:
        if request.cuda_problem and section in GPU_SECTIONS:
            not_run = skipped if "environment" in request.sections else failed  # one line fails with the reason
            found = [not_run(section, "all", request.cuda_problem)]
        else:
            left = request.timeout_seconds - (time.monotonic() - started)
            with tempfile.TemporaryDirectory(prefix="webrl-gpu-check-") as folder:
                found = _run_section(request, section, Path(folder), console, left)
        console.print(f"{section}: {_outcome(found)}", highlight=False, markup=False)
        results += found
    print_results(console, results)
    seconds = time.monotonic() - started
    if report is not None:
        write_report(report, _header(request, seconds, command), results)
        console.print(f"report: {report}", highlight=False, markup=False, soft_wrap=True)
    return int(any(each.status == "failed" for each in results))


def _run_section(
    request: GpuCheckRequest, section: str, folder: Path, console: Console, seconds: float
) -> list[CheckResult]:
    """The results of a section; a failure if its process dies, or takes longer than the `seconds` that are left."""
    budget = f"of {request.timeout_seconds:g} s for all sections (--timeout-seconds)"
    if seconds <= 0:
        return [failed(section, "time", f"it did not run: nothing is left {budget}; run it with --section")]
    request.save(folder)
    log, path = folder / "section.log", folder / section_process.RESULTS_FILE
    command = [sys.executable, "-m", section_process.__name__, str(folder), section]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = child_process.start_process(command, log, environment, f"gpu-check {section}")
    started = time.monotonic()
    try:
        with console.status(f"{section} ...") as status:
            while process.poll() is None and time.monotonic() - started < seconds:
                results = _read(path)
                status.update(
                    f"{section}, {time.monotonic() - started:.0f} s: {results[-1].name if results else '...'}"
                )
                time.sleep(POLL_SECONDS)
    finally:
        code = process.poll()
        child_process.terminate_tree(process)
    results = _read(path)
    if code is None:
        run_folder.sweep_leftovers()  # of the job of a section that was killed
        results.append(failed(section, "time", f"it took more than the {seconds:.3g} s that were left {budget}"))
    elif code:
        results.append(failed(section, "its process", process.describe_end()))
        console.print("\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:]), markup=False, style="dim")
    return results


def _read(path: Path) -> list[CheckResult]:
    """The complete lines of a file of results."""
    text = path.read_text() if path.is_file() else ""
    return [CheckResult.from_json(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _outcome(results: Sequence[CheckResult]) -> str:
    bad = sum(each.status == "failed" for each in results)
    return f"{bad} of {len(results)} failed" if bad else f"{len(results)} checked"


def _header(request: GpuCheckRequest, seconds: float, command: Sequence[str]) -> dict[str, Any]:
    return {
        "command": list(command),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "host": os.uname().nodename,
        "version": __version__,
        "platform": request.platform,
        "sections": list(request.sections),
    }
