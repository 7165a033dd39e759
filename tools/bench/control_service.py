"""Load on the control service of a job ten times as large as 32 nodes, with kills and stops.

    python -m tools.bench.control_service [--quick] [--json FILE]

Simulates 480 nodes of eight roles, 1,280 workers and 2,560 trainer ranks, against one service process (a tenth with
--quick). Each node has its relay (control/relay.py). First nothing fails: counts the CPU time of the service, and how
long requests of a trainer take and a change takes to arrive. Then the service is killed 20 times (5) and stopped for
10, 30 and 120 s (3 s). Each ticket must have been run by one worker, and none may be missing. Exit code 1 if a goal is
missed.

Four nodes are processes of their own, with real clients that reach their relay over loopback; the arrival of a change
is measured in these. The others share a process at nice 10: their relays reach the service over HTTP, from threads as
in a supervisor, and their roles call the relay without HTTP. This process is the trainer whose requests are measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from megatron_webrl.control.client import RELAY_VARIABLE, ControlClient
from megatron_webrl.control.connection import ControlAddress
from megatron_webrl.control.relay import Relay, start_relay
from megatron_webrl.control.server import Unavailable
from megatron_webrl.control.state import TICKETS
from megatron_webrl.types import TaskReference
from tests.control.service_process import ServiceProcess, service_process
from tools.arguments import make_bench_parser, write_json

WORKERS, RANKS, ROLES_PER_NODE = 1280, 2560, 8
GROUP_SECONDS = 60.0  # for which a worker runs a ticket, on average
CONNECT_SECONDS = 120.0  # for all roles
START_SECONDS = 10.0  # over which the roles start
QUIET_SECONDS = 40.0
REQUEST_PAUSE_SECONDS = 0.05  # between two requests of the trainer
REQUESTS_PER_OFFER = 40
LISTENERS = 4  # nodes with a process of their own
GOAL_SECONDS, GOAL_SECONDS_QUICK = 0.3, 0.05  # p99 of a trainer's request
GOAL_CORES = 1.0
GOAL_ARRIVAL_SECONDS = 0.2
KILLS, STOPS = 20, (10.0, 30.0, 120.0)
KEYS = ("end", "stop", "weights/offer", "weights/trainer", "evaluation/request", "silent/trainer-0")
NICE = 10  # of the simulated nodes that share a process
CONTEXT = multiprocessing.get_context("spawn")


@dataclass
class Simulation:
    """The nodes of a job that share a process, on one event loop."""

    address: Path
    http: aiohttp.ClientSession
    run_of: dict[int, list[str]] = field(default_factory=dict)  # workers by closed ticket
    ended: bool = False

    def node(self, number: int, names: list[str], tasks: asyncio.TaskGroup) -> None:
        """Start a node: its relay and its roles."""
        relay = Relay(self.address, f"node-{number}")
        threading.Thread(target=relay.follow, daemon=True).start()
        for name in names:
            tasks.create_task(self.role(relay, name))
            if name.startswith("rollout"):
                tasks.create_task(self.worker(name))

    async def role(self, relay: Relay, name: str) -> None:
        """Exchange heartbeats until the simulation ends."""
        body: dict[str, Any] = {"session": name, "keys": KEYS, "wait": 1.0}
        report = {"status": "version 7: 4 groups running, 90 episodes done", "sender": name}
        progress = itertools.count()
        await asyncio.sleep(random.uniform(0.0, START_SECONDS))
        while not self.ended:
            body |= {"roles": {name: (0.0, report | {"progress": f"1:{next(progress)}"})}}
            try:
                answer = json.loads(await relay.sync(body))
            except Unavailable:  # a client would ask the service itself: the listening nodes do
                await asyncio.sleep(1.0)
                continue
            body |= {"revision": answer["revision"], "wait": answer["interval"]}
        relay.ended = True

    async def worker(self, name: str) -> None:
        """Claim tickets one by one, run each for a while, and close it."""
        number = itertools.count(1)
        body: dict[str, Any] = {"session": name, "keys": KEYS, "stream": name}
        while not self.ended:
            body |= {"number": next(number), "commands": [["claim", TICKETS, name, 1, 1]], "wait": 5.0}
            answer = await self.post(body)
            body |= {"revision": answer["revision"]}
            for ticket, *_ in answer["replies"][0]:
                await asyncio.sleep(random.uniform(0.5, 1.5) * GROUP_SECONDS * (not self.ended))
                close = {"stream": name, "number": next(number), "commands": [["close", TICKETS, ticket]]}
                assert (await self.post(close))["replies"] == [True]
                self.run_of.setdefault(ticket, []).append(name)

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Post to /sync until it is answered, as control/connection.py does."""
        while True:
            address = ControlAddress.read(self.address)
            assert address is not None
            url, headers = f"http://{address.host}:{address.port}/sync", {"Authorization": f"Bearer {address.token}"}
            with suppress(aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError):
                async with self.http.post(url, json=body, headers=headers, raise_for_status=True) as answer:
                    return dict(await answer.json())
            await asyncio.sleep(random.uniform(0.1, 1.0))


@contextmanager
def _process(work: Callable[..., None], *arguments: Any) -> Iterator[Pipe]:
    """Run `work(pipe, *arguments)` in a process of its own."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _simulate(pipe: Pipe, address: Path, nodes: list[list[str]]) -> None:
    """Run nodes that share this process until a message comes; sends the workers by closed ticket."""
    os.nice(NICE)
    pipe.send(asyncio.run(_run_simulation(pipe, address, nodes)))


async def _run_simulation(pipe: Pipe, address: Path, nodes: list[list[str]]) -> dict[int, list[str]]:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(200.0))
    async with session as http, asyncio.TaskGroup() as tasks:
        simulation = Simulation(address, http)
        for number, roles in enumerate(nodes):
            simulation.node(number, roles, tasks)
        await asyncio.to_thread(pipe.recv)
        simulation.ended = True
    return simulation.run_of


def _listen(pipe: Pipe, address: Path, roles: list[str]) -> None:
    """Run the clients of a node until a message comes; sends the seconds that each offer took to arrive at each."""
    os.environ[RELAY_VARIABLE] = str(start_relay(address, "listener"))
    clients = [ControlClient(address, role, lost_seconds=600.0) for role in roles]
    last, arrivals = dict.fromkeys(roles), []
    for client in clients:
        client.start_heartbeat()
    while not pipe.poll():
        for client in clients:
            if (offered_at := client.get_json("weights/offer")) != last[client.role]:
                last[client.role] = offered_at
                arrivals.append(time.monotonic() - offered_at)
        time.sleep(0.001)
    pipe.send(arrivals)


@dataclass
class Findings:
    """Figures by name, and the goals that were missed."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any, most: float | None = None) -> None:
        self.figures[name] = value
        if most is not None and value > most:
            self.problems.append(f"{name}: {value}, the goal is at most {most}")


def measure(quick: bool) -> Findings:
    """Run the simulation, first undisturbed, then with faults."""
    share, findings = 10 if quick else 1, Findings()
    names = [f"rollout-{n}" for n in range(WORKERS // share)] + [f"rank-{n}" for n in range(RANKS // share)]
    nodes = [names[first : first + ROLES_PER_NODE] for first in range(0, len(names), ROLES_PER_NODE)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        service = stack.enter_context(service_process(folder, heartbeat_timeout_seconds=20.0))
        trainer = service.connect("trainer-0", 600.0)
        trainer.start_heartbeat()
        trainer.start_ticket_epoch(0, 0, {})
        _issue(trainer, 2 * WORKERS // share)
        listeners = [stack.enter_context(_process(_listen, service.address, n)) for n in nodes[-LISTENERS:]]
        others = stack.enter_context(_process(_simulate, service.address, nodes[:-LISTENERS]))
        deadline = time.monotonic() + CONNECT_SECONDS
        while len(trainer.role_reports()) <= len(names):  # the trainer is another one
            assert time.monotonic() < deadline, f"not all roles have connected after {CONNECT_SECONDS:.0f} s"
            time.sleep(1.0)
        _measure_quiet(service, trainer, findings, quick)
        _disturb(service, trainer, findings, 5 if quick else KILLS, (3.0,) if quick else STOPS)
        silent = [role for role, each in trainer.role_reports().items() if each["silent_seconds"] > 20]
        findings.add("roles that count as silent after the outages", len(silent), 0)
        trainer.rewind_tickets()
        claimed = trainer.run("read_queue", TICKETS)["claimed"]  # the first ones, as they are claimed in order
        for pipe in (others, *listeners):
            pipe.send("end")
        run_of: dict[int, list[str]] = others.recv()
        arrivals = [seconds for pipe in listeners for seconds in pipe.recv()]
    findings.add("p99 until a change arrives, s", round(_p99(arrivals), 4), GOAL_ARRIVAL_SECONDS)
    findings.add("tickets run", len(run_of))
    findings.add("tickets run by two workers", sum(len(each) > 1 for each in run_of.values()), 0)
    findings.add("tickets that no worker ran", len(set(range(claimed)) - run_of.keys()), 0)
    return findings


def _issue(trainer: ControlClient, count: int) -> None:
    first = trainer.run("read_queue", TICKETS)["appended"]
    trainer.issue_tickets({first + n: TaskReference("click-test/1", "click-test", 1, 10) for n in range(count)})


def _measure_quiet(service: ServiceProcess, trainer: ControlClient, findings: Findings, quick: bool) -> None:
    seconds, goal = (QUIET_SECONDS / 4, GOAL_SECONDS_QUICK) if quick else (QUIET_SECONDS, GOAL_SECONDS)
    assert service.process is not None
    process, times = psutil.Process(service.process.pid), []
    before, started = sum(process.cpu_times()[:2]), time.monotonic()
    while (now := time.monotonic()) - started < seconds:
        _issue(trainer, 2)
        times.append(time.monotonic() - now)
        if len(times) % REQUESTS_PER_OFFER == 1:
            trainer.put_json("weights/offer", time.monotonic())
        time.sleep(REQUEST_PAUSE_SECONDS)
    cores = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - started)
    findings.add("CPU cores of the service", round(cores, 3), GOAL_CORES)
    findings.add("median of a trainer's request, s", round(statistics.median(times), 4))
    findings.add("p99 of a trainer's request, s", round(_p99(times), 4), goal)
    findings.add("resident memory of the service, MiB", process.memory_info().rss // 2**20)


def _disturb(
    service: ServiceProcess, trainer: ControlClient, findings: Findings, kills: int, stops: tuple[float, ...]
) -> None:
    away = []
    for _ in range(kills):
        _issue(trainer, 100)
        time.sleep(random.uniform(0.5, 3.0))
        started = time.monotonic()
        service.kill()
        service.start()
        away.append(time.monotonic() - started)
    findings.add("kills of the service", kills)
    findings.add("median outage after a kill, s", round(statistics.median(away), 2))
    for seconds in stops:
        service.signal(signal.SIGSTOP)
        time.sleep(seconds)
        service.signal(signal.SIGCONT)
        time.sleep(5.0)
    findings.add("stops of the service, s", list(stops))


def _p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[-1]


def main() -> int:
    """Run the benchmark; exit code 1 if a goal is missed."""
    options = make_bench_parser(__doc__, "a tenth of the job").parse_args()
    findings = measure(options.quick)
    for name, value in findings.figures.items():
        print(f"{name}: {value}")
    for problem in findings.problems:
        print(f"FAILED: {problem}")
    write_json(options.json, {"figures": findings.figures, "problems": findings.problems})
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
