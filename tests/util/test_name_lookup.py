import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# A judge and a browser server whose names are never resolved, in the event loop of a worker.
WORKER = """
import asyncio, json, os, time
from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig, judge_config
from megatron_webrl.browser.server.client import BrowserClient
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.client import JudgeClient, RequestFailed, Spending
from megatron_webrl.util import network

network.LOOKUP_SECONDS = 1.0
FAILURES = []

async def judge(client):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    try:
        await client.complete("verdict", body, 0, asyncio.get_running_loop().time() + 1.5, Spending())
    except RequestFailed as error:
        FAILURES.append(error.name)

async def lease(client):
    try:
        await client.request("GET", "http://browsers.black-hole.test:8700", "/state", seconds=1.5)
    except Exception as error:
        FAILURES.append(type(error).__name__)

async def main():
    settings = judge_config(verdict=JudgeModelConfig("m", "http://judge.black-hole.test:8000/v1"))
    worst, browsers = 0.0, BrowserClient("http://browsers.black-hole.test:8700")
    async with JudgeClient(settings, LocalMeter(BudgetConfig())) as client, browsers:
        tasks = [asyncio.create_task(work) for _ in range(64) for work in (judge(client), lease(browsers))]
        while not all(task.done() for task in tasks):
            started = time.monotonic()
            await asyncio.to_thread(int)
            worst = max(worst, time.monotonic() - started)
            await asyncio.sleep(0.05)
        await asyncio.gather(*tasks)
    return worst

worst = asyncio.run(main())
print(json.dumps({"worst": worst, "failures": {name: FAILURES.count(name) for name in set(FAILURES)}}))
"""


UNSHARED = ["unshare", "--mount"]
NO_NAMESPACE = subprocess.run([*UNSHARED, "true"], capture_output=True, text=True).stderr.strip()


@pytest.mark.skipif(bool(NO_NAMESPACE), reason=NO_NAMESPACE)
def test_a_name_server_that_does_not_answer_takes_no_threads_of_other_work_and_holds_up_no_end(tmp_path: Path):
    file, address = tmp_path / "resolv.conf", f"127.53.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
    file.write_text(f"nameserver {address}\noptions timeout:30 attempts:4\n")  # a lookup takes two minutes, and fails
    inside = [*UNSHARED, "sh", "-c", f'mount --bind {file} /etc/resolv.conf && exec "$@"', "sh"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        command = [*inside, sys.executable, "-c", WORKER]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["worst"] < 5.0
    assert sum(found["failures"].values()) == 128
    assert set(found["failures"]) <= {"deadline", "ServerUnreachable", "BrowserTimeout"}
