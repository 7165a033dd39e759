"""Requests that schemathesis generates from the OpenAPI document get declared responses.

Half of them have a live lease, and a task that exists: they reach real browsers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from http import HTTPStatus

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, strategies
from schemathesis import APIOperation, Case, GenerationMode

from tests.browser.server.conftest import LIMIT, browser_server

OF_ANY_PATH = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)  # the framework's answers to what it does not have


class Requests:
    """Generated requests to one server; a live lease is kept for those that need one."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/v1/leases"
        self.statuses: dict[str, Counter[int]] = defaultdict(Counter)  # of responses, by operation
        self.lease = "none"
        document = requests.get(f"{url}/openapi.json", timeout=LIMIT).json()
        self.operations = [each.ok() for each in schemathesis.openapi.from_dict(document).get_all_operations()]

    def send(self, operation: APIOperation, count: int, seed: int) -> None:
        cases = strategies.one_of(*(operation.as_strategy(mode) for mode in GenerationMode))

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @hypothesis.given(cases, strategies.booleans())
        def send(case: Case, live: bool) -> None:
            if live:
                self.make_live(case)
            response = case.call(base_url=self.url.removesuffix("/v1/leases"), timeout=LIMIT)
            status = response.status_code
            self.statuses[operation.label][status] += 1
            declared = str(status) in operation.responses.status_codes or status in OF_ANY_PATH
            assert declared, f"{operation.label}: {status} {response.content[:300]!r}; {case.as_curl_command()[:500]}"
            if operation.label == "POST /v1/leases" and status == HTTPStatus.CREATED:
                requests.delete(f"{self.url}/{response.json()['id']}", timeout=LIMIT)

        send()

    def make_live(self, case: Case) -> None:
        """Name a lease and a task that exist, where the case has such a field."""
        task = {"source": "miniwob", "environment": "click-test"}
        if "lease" in (case.path_parameters or {}):
            if not requests.get(f"{self.url}/{self.lease}", timeout=LIMIT).ok:
                answer = requests.post(self.url, json={"seconds": 600}, timeout=LIMIT)
                self.lease = answer.json()["id"] if answer.ok else "none"
                requests.post(f"{self.url}/{self.lease}/reset", json=task, timeout=LIMIT)
            case.path_parameters = {**case.path_parameters, "lease": self.lease}
        if isinstance(case.body, dict) and case.path.endswith("/reset"):
            case.body = task | {"seed": case.body.get("seed", 0)}


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])])
def test_generated_requests_get_declared_responses(count: int) -> None:
    with browser_server(sessions=4, WEBRL_BROWSERS_TOKEN="") as server:
        sent, seed = Requests(server.url), 0
        while sum(map(Counter.total, sent.statuses.values())) < count:  # some operations have few cases in a round
            for operation in sent.operations:
                sent.send(operation, -(-count // len(sent.operations)), seed)
                seed += 1
        assert server.process.poll() is None
    assert {200, 400} <= sent.statuses["POST /v1/leases/{lease}/reset"].keys()
