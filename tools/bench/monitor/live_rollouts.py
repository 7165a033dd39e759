"""The page of rollouts: 2,000 that change five times a second, and three viewers, one of which stops reading.

    python -m tools.bench.monitor.live_rollouts [--quick] [--json FILE]

50 workers of 40 rollouts (20 in the short form) share a process, each with a table and a connection to a control
service of its own. The control service and `webrl monitor` have a process each. One viewer is Chromium, which scrolls
through all cells while the time between its frames is measured; one asks as a page does; one reads nothing. Cores are
processor time over wall-clock time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from playwright.async_api import CDPSession, async_playwright

from megatron_webrl.browser.chromium import find_chromium, use_sandbox
from megatron_webrl.control.child_process import die_with_parent
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.http.access import encoded
from megatron_webrl.control.liveness import Liveness
from megatron_webrl.monitor.command import TOKEN_VARIABLE
from megatron_webrl.monitor.live_view import POLL_SECONDS
from megatron_webrl.track.live_rollouts import (
    ACTING,
    JUDGING,
    OBSERVING,
    STATES,
    WAITING_FOR_MODEL,
    WAITING_FOR_STEP,
    LiveRollout,
    RolloutTable,
)
from megatron_webrl.types import Task
from tests.control.service_process import service_process
from tests.monitor.runs import write_run
from tools.arguments import make_bench_parser, write_json

WORKERS, QUICK_WORKERS, ROLLOUTS = 50, 20, 40
GROUP, MAX_STEPS = 8, 15
CHANGES_PER_SECOND = 5
LARGE_JOB = 128  # workers, for the time of an answer of the control service
TICK_SECONDS = 0.02
MEASURED_SECONDS, QUICK_SECONDS = 20.0, 4.0
OTHER_STATES = (WAITING_FOR_STEP, WAITING_FOR_MODEL, ACTING, OBSERVING, JUDGING, *STATES[:2])
LIMIT = 60.0
GOAL_CORES, GOAL_FRAME_MS = 0.2, 33.4  # two periods of a display at 60 Hz
TOKEN = "a-token-of-the-bench"
NICE = 10  # of the simulated workers
CONTEXT = multiprocessing.get_context("spawn")
SCROLL = """
async (seconds) => {
  const box = document.querySelector(".wall"), frames = [], started = performance.now();
  let before = 0, direction = 1;
  await new Promise((done) => requestAnimationFrame(function frame(now) {
    if (before) frames.push(now - before);
    before = now;
    if (box.scrollTop + box.clientHeight >= box.scrollHeight - 1) direction = -1;
    if (box.scrollTop <= 0) direction = 1;
    box.scrollTop += direction * 40;
    if (now - started < seconds * 1000) requestAnimationFrame(frame); else done();
  }));
  return frames;
}
"""


def simulate(stop: Any, address: Path, workers: int) -> None:
    """Run the workers' tables until `stop` is set."""
    os.nice(NICE)
    die_with_parent()
    tables, chance = [], random.Random(0)
    for worker in range(workers):
        table = RolloutTable()
        control = ControlClient(address, f"rollout-{worker}")
        control.start_heartbeat()
        control.report_rollouts(table.encode)
        tables.append(table)
    live = [open_rollout(table, worker, slot) for worker, table in enumerate(tables) for slot in range(ROLLOUTS)]
    due = 0.0
    while not stop.is_set():
        due += len(live) * CHANGES_PER_SECOND * TICK_SECONDS
        for _ in range(int(due)):
            each = chance.choice(live)
            if each.state == ACTING:
                each.end_step([chance.randrange(40, 44)])
            else:
                each.set(chance.choice(OTHER_STATES))
            if each.step >= MAX_STEPS:
                each.finish(chance.choice(("success", "failure", "browser_timeout")))
                each.step = 0
        due -= int(due)
        stop.wait(TICK_SECONDS)


def open_rollout(table: RolloutTable, worker: int, slot: int) -> LiveRollout:
    """A rollout of a worker's table, in groups of GROUP."""
    ticket = worker * 1000 + slot // GROUP
    site = f"shop-{ticket % 29}.test"
    difficulty = ("easy", "medium", "hard")[ticket % 3]
    task = Task(f"web/{ticket}", "web", "", 0, MAX_STEPS, difficulty=difficulty, website=site)
    live = table.open("training", ticket, slot % GROUP, GROUP, task)
    live.start_try()
    return live


@contextmanager
def monitor_process(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """`webrl monitor` of a run; yields the process and its address."""
    command = [sys.executable, "-m", "megatron_webrl", "monitor", str(folder), "--port", "0"]
    environment = os.environ | {TOKEN_VARIABLE: TOKEN}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        preexec_fn=die_with_parent,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://\S+?(?=/\?token)", line):
                yield psutil.Process(process.pid), found[0]
                break
        process.terminate()


@dataclass
class Reader:
    """A viewer that counts answers and bytes."""

    answers: int = 0
    bytes: int = 0

    async def read(self, address: str) -> None:
        headers, after = {"authorization": f"Bearer {TOKEN}"}, 0.0
        async with httpx.AsyncClient(timeout=LIMIT, headers=headers) as client:
            while True:
                answer = await client.get(f"{address}/api/rollouts", params={"after": after})
                after = max([after, *(counts[0] for counts in answer.json()["history"])])
                self.answers, self.bytes = self.answers + 1, self.bytes + len(answer.content)
                await asyncio.sleep(POLL_SECONDS)


def stalled_viewer(address: str) -> socket.socket:
    """A viewer that reads nothing, with a small buffer."""
    place = urlsplit(address)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((place.hostname, place.port))
    head = f"GET /api/rollouts HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


async def measure(
    address: str, server: psutil.Process, control: psutil.Process, rollouts: int, seconds: float
) -> dict[str, Any]:
    """Figures of the server, the control service and the page."""
    reader, stalled = Reader(), stalled_viewer(address)
    reading = asyncio.create_task(reader.read(address))
    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=find_chromium(), chromium_sandbox=use_sandbox())
        page = await browser.new_page(viewport={"width": 1280, "height": 800})
        await page.goto(f"{address}/?token={TOKEN}#/rollouts")
        await page.goto(f"{address}/#/rollouts?by=group")
        await page.get_by_text(f"{rollouts:,} of {rollouts:,} rollouts shown").wait_for(timeout=LIMIT * 1000)
        before, started = [sum(each.cpu_times()[:2]) for each in (server, control)], time.monotonic()
        answers, received = reader.answers, reader.bytes
        work = await page.context.new_cdp_session(page)
        await work.send("Performance.enable", {"timeDomain": "threadTicks"})
        busy = await _busy_seconds(work)
        frames = await page.evaluate(SCROLL, seconds)
        wall = time.monotonic() - started
        cores = [(sum(each.cpu_times()[:2]) - one) / wall for each, one in zip((server, control), before, strict=True)]
        figures = {
            "rollouts": rollouts,
            "monitor_cores": round(cores[0], 3),
            "control_service_cores": round(cores[1], 3),
            "answers_per_second": round((reader.answers - answers) / wall, 2),
            "kilobytes_per_second": round((reader.bytes - received) / wall / 1000, 1),
            "page_work_ms_per_frame": round(1000 * (await _busy_seconds(work) - busy) / len(frames), 1),
            "frame_ms_median": round(statistics.median(frames), 1),
            "frame_ms_p95": round(statistics.quantiles(frames, n=20)[-1], 1),
            "frame_ms_max": round(max(frames), 1),
            "monitor_mib": round(server.memory_info().rss / 2**20),
        }
        await browser.close()
    reading.cancel()
    stalled.close()
    return figures


async def _busy_seconds(session: CDPSession) -> float:
    """Processor time of the page's main thread."""
    metrics = (await session.send("Performance.getMetrics"))["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


def table_microseconds() -> tuple[float, float]:
    """Processor time of a change of state, and of the encoding of a worker's table."""
    table = RolloutTable()
    live = [open_rollout(table, 0, slot) for slot in range(ROLLOUTS)]
    started = time.process_time()
    for _ in range(2500):
        for each in live:
            each.set(ACTING)
    change = (time.process_time() - started) / (2500 * ROLLOUTS)
    started = time.process_time()
    for _ in range(200):
        table.encode()
    return change * 1e6, (time.process_time() - started) / 200 * 1e6


def answer_milliseconds() -> float:
    """Processor time that an answer of the control service takes with LARGE_JOB workers."""
    table, liveness = RolloutTable(), Liveness(60.0)
    for slot in range(ROLLOUTS):
        open_rollout(table, 0, slot)
    for worker in range(LARGE_JOB):
        liveness.report(f"rollout-{worker}", 0.0, {"rollouts": table.encode()})
    started = time.process_time()
    for _ in range(50):
        encoded({"workers": liveness.rollouts(1.0)})
    return (time.process_time() - started) / 50 * 1e3


def main() -> int:
    """Measure, and print figures; returns 0 if the goals hold."""
    options = make_bench_parser(__doc__, quick=f"{QUICK_WORKERS * ROLLOUTS:,} rollouts").parse_args()
    workers = QUICK_WORKERS if options.quick else WORKERS
    with ExitStack() as stack:
        folder = write_run(Path(stack.enter_context(tempfile.TemporaryDirectory()))).run_folder
        service = stack.enter_context(service_process(folder, heartbeat_timeout_seconds=60.0))
        stop = CONTEXT.Event()
        simulation = CONTEXT.Process(target=simulate, args=(stop, service.address, workers), daemon=True)
        simulation.start()
        server, address = stack.enter_context(monitor_process(folder))
        assert service.process is not None
        control = psutil.Process(service.process.pid)
        seconds = QUICK_SECONDS if options.quick else MEASURED_SECONDS
        figures = asyncio.run(measure(address, server, control, workers * ROLLOUTS, seconds))
        stop.set()
        simulation.join()
    change, encoding = table_microseconds()
    figures |= {"change_of_state_us": round(change, 2), "encoded_table_us": round(encoding, 1)}
    figures["answer_of_a_large_job_ms"] = round(answer_milliseconds(), 1)
    for name, value in figures.items():
        print(f"{name:24} {value}")
    passed = figures["monitor_cores"] <= GOAL_CORES and figures["frame_ms_p95"] <= GOAL_FRAME_MS
    write_json(options.json, figures | {"passed": passed})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
