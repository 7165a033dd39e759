"""Stub of a trainer rank or rollout worker (STUB_COMMAND=) for jobs that end at once or early.

`trainer-0` makes no update. It ends the job when a stop is requested, after writing a checkpoint's marker as a trainer
would, and with the outcome finished in a requeued job. --finish: it ends the job at once; --ignore-stop: the first
launch ignores the request; --no-checkpoint: every launch is pre-empted at once, without a checkpoint. --fail-NAME: the
process NAME fails. It imports only the standard library, so that many start quickly.
"""

import http.client
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 150.0


class Store:
    """A client of the control service (control/server.py) that an address file names."""

    def __init__(self, address_file: Path) -> None:
        self.address = json.loads(address_file.read_text())
        self.connection = http.client.HTTPConnection(self.address["host"], self.address["port"], timeout=SECONDS)
        self.stream, self.number = f"stub-{os.urandom(8).hex()}", 0

    def end(self, outcome: str) -> None:
        self.run("put_if_absent", "end", {"outcome": outcome, "role": "trainer-0"})

    def run(self, *command: Any) -> Any:
        """The reply to a command."""
        self.number += 1
        content = {"stream": self.stream, "number": self.number, "commands": [command]}
        headers = {"Authorization": f"Bearer {self.address['token']}"}
        self.connection.request("POST", "/sync", json.dumps(content), headers)
        response = self.connection.getresponse()
        answer = response.read().decode()
        assert response.status == http.client.OK, f"{command}: {response.status} {answer}"
        return json.loads(answer)["replies"][0]


def main(arguments: list[str]) -> None:
    """[--KIND] role RUN_FOLDER NAME [--attempt N]."""
    kind = arguments.pop(0) if arguments[0].startswith("--") else ""
    folder, name = Path(arguments[1]), arguments[2]
    assert os.environ["WEBRL_ROLE"] == name
    if kind == f"--fail-{name}":
        sys.exit("it fails on purpose")
    store, requeued = Store(folder / "control.json"), os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    deadline = time.monotonic() + SECONDS
    while (facts := store.run("get", ["end", "stop"]))[0] is None:
        assert time.monotonic() < deadline, "nobody ended the job"
        if name == "trainer-0":
            if kind == "--no-checkpoint":
                store.end("preempted")
            elif requeued or kind == "--finish":
                store.end("finished")
            elif facts[1] is not None and kind != "--ignore-stop":
                (folder / "checkpoints").mkdir(exist_ok=True)
                (folder / "checkpoints" / "latest").write_text("version-000001\n")
                store.end(facts[1])
        time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1:])
