"""Drill: generated requests to every path of a browser server, from its OpenAPI document.

  python -m tools.drills.browser_api           5,000 requests
  python -m tools.drills.browser_api --quick   200

Half of the requests have a live lease, and a task that exists: they reach real browsers. Goal: each response has a
status of its operation in the document; a 5xx that is not there is a failure, and so is a server that ends. Exit code 0
if it holds.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from http import HTTPStatus

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, strategies
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.core.result import Err

from tests.browser.server.conftest import Server, browser_server
from tools.arguments import make_bench_parser, write_json

SESSIONS = 4
TIMEOUT_SECONDS = 60.0


@dataclass
class DrillResult:
    """Requests to the server."""

    requests: int = 0
    seconds: float = 0.0
    statuses: dict[str, dict[int, int]] = field(default_factory=dict)  # responses by operation and status
    problems: list[str] = field(default_factory=list)


class ApiDrill:
    """Generated requests to one server; a live lease is kept for those that need one."""

    def __init__(self, service: Server) -> None:
        self.result = DrillResult()
        self._service = service
        document = requests.get(f"{service.url}/openapi.json", timeout=TIMEOUT_SECONDS).json()
        self._schema = schemathesis.openapi.from_dict(document)
        self._statuses: dict[str, Counter[int]] = {}
        self._lease: str | None = None

    def run(self, count: int) -> DrillResult:
        """Send at least `count` requests, in rounds over all operations."""
        started = time.monotonic()
        operations = self._operations()
        result, seed = self.result, 0
        while result.requests < count:  # an operation without parameters has few cases in a round
            for operation in operations:
                self._run_operation(operation, -(-count // len(operations)), seed)
                seed += 1
            result.requests = sum(map(Counter.total, self._statuses.values()))
        result.seconds = time.monotonic() - started
        result.statuses = {name: dict(statuses) for name, statuses in self._statuses.items()}
        if self._service.process.poll() is not None:
            result.problems.append(f"the server ended with code {self._service.process.returncode}")
        return result

    def _operations(self) -> list[APIOperation]:
        operations = []
        for each in self._schema.get_all_operations():
            if isinstance(each, Err):
                raise each.err()
            operations.append(each.ok())
        return operations

    def _run_operation(self, operation: APIOperation, count: int, seed: int) -> None:
        cases = strategies.one_of(*(operation.as_strategy(mode) for mode in GenerationMode))

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @hypothesis.given(cases, strategies.booleans())
        def send(case: Case, is_live: bool) -> None:
            if is_live:
                self._make_live(case)
            self._send(case)

        send()

    def _make_live(self, case: Case) -> None:
        """Name a lease and a task that exist, where the case has such a field."""
        parameters, body = case.path_parameters or {}, case.body
        if "lease" in parameters:
            case.path_parameters = {**parameters, "lease": self._live_lease()}
        if isinstance(body, dict) and case.path.endswith("/reset"):
            case.body = {"source": "miniwob", "environment": "click-test", "seed": body.get("seed", 0)}

    def _live_lease(self) -> str:
        """A lease with an episode, if one can be had."""
        base = f"{self._service.url}/v1/leases"
        known = self._lease and requests.get(f"{base}/{self._lease}", timeout=TIMEOUT_SECONDS)
        if not known or known.status_code >= HTTPStatus.BAD_REQUEST:
            answer = requests.post(base, json={"seconds": 600}, timeout=TIMEOUT_SECONDS)
            self._lease = answer.json()["id"] if answer.status_code == HTTPStatus.CREATED else None
            if self._lease:
                task = {"source": "miniwob", "environment": "click-test"}
                requests.post(f"{base}/{self._lease}/reset", json=task, timeout=TIMEOUT_SECONDS)
        return self._lease or "none"

    def _send(self, case: Case) -> None:
        operation = case.operation
        try:
            response = case.call(base_url=self._service.url, timeout=TIMEOUT_SECONDS)
        except (requests.RequestException, OSError, ValueError) as error:
            self._problem(operation, f"no response: {type(error).__name__}: {error}", case)
            return
        status = response.status_code
        self._statuses.setdefault(operation.label, Counter())[status] += 1
        if str(status) not in operation.responses.status_codes and not _is_of_framework(status):
            self._problem(operation, f"status {status} is not declared: {response.content[:300]!r}", case)
        if operation.label == "POST /v1/leases" and status == HTTPStatus.CREATED:
            url = f"{self._service.url}/v1/leases/{response.json()['id']}"
            requests.delete(url, timeout=TIMEOUT_SECONDS)

    def _problem(self, operation: APIOperation, problem: str, case: Case) -> None:
        kind = f"{operation.label}: {problem[:60]}"
        if not any(known.startswith(kind) for known in self.result.problems):
            self.result.problems.append(f"{operation.label}: {problem}; {case.as_curl_command()[:500]}")


def _is_of_framework(status: int) -> bool:
    """Whether any path may answer so: to a method or path that it does not have."""
    return status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


def main() -> int:
    """Run the drill; returns 0 if its goal holds."""
    options = make_bench_parser(__doc__, "200 requests").parse_args()
    result = run_drill(200 if options.quick else 5000)
    write_json(options.json, asdict(result))
    print(f"{result.requests} requests in {result.seconds:.0f} s")
    for operation, statuses in result.statuses.items():
        print(f"  {operation}: {', '.join(f'{count} x {status}' for status, count in sorted(statuses.items()))}")
    print("\n".join(result.problems) or "passed")
    return 1 if result.problems else 0


def run_drill(count: int) -> DrillResult:
    """Send `count` requests to a new browser server."""
    with browser_server(sessions=SESSIONS, WEBRL_BROWSERS_TOKEN="") as server:
        return ApiDrill(server).run(count)


if __name__ == "__main__":
    sys.exit(main())
