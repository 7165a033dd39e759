"""Drill: the control service of a job ten times as large as 32 nodes, killed and stopped.

    python -m tools.drills.control_service [--quick] [--json FILE]

Simulates 1,280 workers, which claim and close tickets, and 2,560 trainer ranks against one service process (a tenth in
the short form). First nothing fails: counts the CPU time of the service, and how long requests of a trainer take and a
stop takes to arrive. Then the service is killed 20 times (5) and stopped for 10, 30 and 120 s (3 s). Each ticket must
have been run by one worker, and none may be missing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megatron_webrl.control.address import ControlAddress
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.state import TICKETS
from megatron_webrl.control.tickets import TicketEpoch
from tests.control.service_process import ServiceProcess, service_process
from tools.drills.report import Findings, run

WORKERS, RANKS = 1280, 2560
GROUP_SECONDS = 60.0  # for which a worker runs a ticket, on average
QUIET_SECONDS = 40.0
LISTENERS = 32  # simulated ranks that measure how long a change takes to arrive
GOAL_SECONDS = 0.05  # p99 of a trainer's request
GOAL_CORES = 1.0
GOAL_ARRIVAL_SECONDS = 0.1
KILLS, STOPS = 20, (10.0, 30.0, 120.0)
SUBSCRIPTIONS = ("end", "stop", "weights/offer", "weights/trainer", "evaluation/request", "silent/trainer-0")


@dataclass
class Simulation:
    """The roles of a job, on one event loop."""

    address: Path
    run_of: dict[int, list[str]] = field(default_factory=dict)  # workers by closed ticket
    offers: list[float] = field(default_factory=list)  # seconds until a change had arrived
    ended: bool = False

    async def role(self, name: str, listens: bool) -> None:
        """Exchange heartbeats until the simulation ends."""
        connection, state = _HttpConnection(self.address), {"service": "", "known": 0}
        subscribe, progress = list(SUBSCRIPTIONS), itertools.count()
        await asyncio.sleep(random.random())
        wait = 1.0
        while not self.ended:
            report = {"progress": f"1:{next(progress)}", "status": "version 7: 4 groups running, 90 episodes done"}
            body = {"session": name, "subscribe": subscribe, "role": name, "report": report, "wait": wait, **state}
            answer = await connection.post("/exchange", body)
            again = answer["service"] != state["service"] or answer["subscriptions"] < len(SUBSCRIPTIONS)
            subscribe = list(SUBSCRIPTIONS) if again else []
            state, wait = {"service": answer["service"], "known": answer["revision"]}, answer["interval"]
            offer = answer["facts"].get("weights/offer", [0, None])[1]
            if listens and offer is not None:
                self.offers.append(time.monotonic() - offer)

    async def worker(self, name: str) -> None:
        """Claim tickets one by one, run each for a while, and close it."""
        connection, number = _HttpConnection(self.address), itertools.count(1)
        while not self.ended:
            body = {"stream": name, "number": next(number), "arguments": [TICKETS, name, 1, 1], "wait": 5.0}
            for slot, ticket, _ in (await connection.post("/claim", body))["replies"][0]:
                await asyncio.sleep(random.uniform(0.5, 1.5) * GROUP_SECONDS * (not self.ended))
                close = {"stream": name, "number": next(number), "commands": [["close", TICKETS, slot]]}
                assert (await connection.post("/commands", close))["replies"] == [True]
                self.run_of.setdefault(ticket, []).append(name)


class _HttpConnection:
    """Posts a request until it is answered, as control/connection.py does."""

    def __init__(self, address: Path) -> None:
        self._path = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        content = json.dumps(body).encode()
        while True:
            try:
                async with asyncio.timeout(body.get("wait", 0.0) + 200.0):
                    return await self._attempt(path, content)
            except (OSError, asyncio.IncompleteReadError):
                self._streams = None
                await asyncio.sleep(random.uniform(0.1, 1.0))

    async def _attempt(self, path: str, content: bytes) -> dict[str, Any]:
        address = ControlAddress.read(self._path)
        assert address is not None
        if self._streams is None:
            self._streams = await asyncio.open_connection(address.host, address.port)
        reader, writer = self._streams
        head = f"POST {path} HTTP/1.1\r\nHost: {address.host}\r\nAuthorization: Bearer {address.token}\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.split(b"content-length: ")[1].split(b"\r\n")[0])
        found: dict[str, Any] = json.loads(await reader.readexactly(length))
        assert b" 200 " in answer.split(b"\r\n")[0], found
        return found


def measure(quick: bool) -> Findings:
    """Run the simulation, first undisturbed, then with faults."""
    share = 10 if quick else 1
    with tempfile.TemporaryDirectory() as name, service_process(Path(name), heartbeat_timeout_seconds=20.0) as service:
        return asyncio.run(_measure(service, WORKERS // share, RANKS // share, quick))


async def _measure(service: ServiceProcess, workers: int, ranks: int, quick: bool) -> Findings:
    findings, simulation = Findings(), Simulation(service.address)
    trainer = await asyncio.to_thread(service.connect, "trainer-0", 600.0)
    trainer.start_ticket_epoch(TicketEpoch(0, 0, 0, (), 0), limit=2 * workers)
    names = [f"rollout-{number}" for number in range(workers)] + [f"rank-{number}" for number in range(ranks)]
    async with asyncio.TaskGroup() as tasks:
        for number, role in enumerate(names):
            tasks.create_task(simulation.role(role, listens=not number % (len(names) // LISTENERS)))
            if role.startswith("rollout"):
                tasks.create_task(simulation.worker(role))
        await asyncio.sleep(10)  # all have connected
        await _measure_quiet(service, simulation, trainer, findings, QUIET_SECONDS / (4 if quick else 1))
        await _disturb(service, findings, 5 if quick else KILLS, (3.0,) if quick else STOPS)
        await asyncio.to_thread(trainer.put_json, "weights/offer", None)
        silent = [
            r for r, each in (await asyncio.to_thread(trainer.role_reports)).items() if each["silent_seconds"] > 20
        ]
        _add(findings, "roles that count as silent after the outages", len(silent), 0)
        limit = await asyncio.to_thread(trainer.claimed_slots)
        await asyncio.to_thread(trainer.set_ticket_limit, limit)
        simulation.ended = True
    missing = set(range(limit)) - simulation.run_of.keys()
    _add(findings, "tickets run", len(simulation.run_of))
    _add(findings, "tickets run by two workers", sum(len(each) > 1 for each in simulation.run_of.values()), 0)
    _add(findings, "tickets that no worker ran", len(missing), 0)
    return findings


async def _measure_quiet(
    service: ServiceProcess, simulation: Simulation, trainer: ControlClient, findings: Findings, seconds: float
) -> None:
    assert service.process is not None
    process, times = psutil.Process(service.process.pid), []
    before, started = sum(process.cpu_times()[:2]), time.monotonic()
    limit = trainer.claimed_slots() + 2
    while (now := time.monotonic()) - started < seconds:
        limit += 2
        await asyncio.to_thread(trainer.set_ticket_limit, limit)
        times.append(time.monotonic() - now)
        if len(times) % 40 == 1:
            await asyncio.to_thread(trainer.put_json, "weights/offer", time.monotonic())
        await asyncio.sleep(0.05)
    cores = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - started)
    _add(findings, "CPU cores of the service", round(cores, 3), GOAL_CORES)
    _add(findings, "median of a trainer's request, s", round(statistics.median(times), 4))
    _add(findings, "p99 of a trainer's request, s", round(statistics.quantiles(times, n=100)[-1], 4), GOAL_SECONDS)
    arrival = statistics.quantiles(simulation.offers, n=100)[-1]
    _add(findings, "p99 until a change arrives, s", round(arrival, 4), GOAL_ARRIVAL_SECONDS)
    _add(findings, "resident memory of the service, MiB", process.memory_info().rss // 2**20)


async def _disturb(service: ServiceProcess, findings: Findings, kills: int, stops: tuple[float, ...]) -> None:
    away = []
    for _ in range(kills):
        await asyncio.sleep(random.uniform(0.5, 3.0))
        started = time.monotonic()
        await asyncio.to_thread(service.kill)
        await asyncio.to_thread(service.start)
        away.append(time.monotonic() - started)
    _add(findings, "kills of the service", kills)
    _add(findings, "median outage after a kill, s", round(statistics.median(away), 2))
    for seconds in stops:
        service.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        service.signal(signal.SIGCONT)
        await asyncio.sleep(5.0)
    _add(findings, "stops of the service, s", list(stops))


def _add(findings: Findings, name: str, value: Any, most: float | None = None) -> None:
    findings.figures[name] = value
    findings.expect(most is None or value <= most, f"{name}: {value}, the goal is at most {most}")


if __name__ == "__main__":
    sys.exit(run("control_service", __doc__ or "", measure))
