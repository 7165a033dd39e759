"""Stub of a trainer rank or rollout worker (STUB_COMMAND=), which checks that the job placed it correctly.

Each process compares its arguments, environment, devices, cores, ports and ring with placement.json of the run, meets
all others through the job's control service, and uses its node's ring. The first rank collects the facts of all
processes in stubs.json and ends the job. Hundreds of stubs start on two cores, so they import only the standard library
and send their own requests to the control service (control/server.py).
"""

import http.client
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 150.0
POLL_SECONDS = 0.5


class Store:
    """A client of the control service that an address file names."""

    def __init__(self, address_file: Path) -> None:
        self.address = json.loads(address_file.read_text())
        self.connection = http.client.HTTPConnection(self.address["host"], self.address["port"], timeout=SECONDS)
        self.stream, self.number = f"stub-{os.urandom(8).hex()}", 0

    def put(self, key: str, value: Any) -> None:
        self._run("put", key, value)

    def put_if_absent(self, key: str, value: Any) -> Any:
        return self._run("put_if_absent", key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._run("add", key, amount))

    def get(self, *keys: str) -> list[Any]:
        """The values; None without one."""
        values: list[Any] = self._run("get", list(keys))
        return values

    def until(self, key: str, count: int = 1) -> None:
        """Wait for a counter. The process ends with the job."""
        deadline = time.monotonic() + SECONDS
        while True:
            value, end = self.get(key, "end")
            if (value or 0) >= count:
                return
            if end is not None:
                sys.exit(f"the job has ended: {end}")
            assert time.monotonic() < deadline, f"{key} is {value}, not {count}, after {SECONDS:.0f} s"
            time.sleep(POLL_SECONDS)

    def _run(self, *command: Any) -> Any:
        self.number += 1
        content = {"stream": self.stream, "number": self.number, "commands": [command]}
        headers = {"Authorization": f"Bearer {self.address['token']}"}
        self.connection.request("POST", "/sync", json.dumps(content), headers)
        response = self.connection.getresponse()
        answer = response.read().decode()
        assert response.status == http.client.OK, f"{command}: {response.status} {answer}"
        (reply,) = json.loads(answer)["replies"]
        assert not isinstance(reply, dict) or "error" not in reply, f"{command}: {reply}"
        return reply


def numbers(text: str) -> list[int]:
    """Those of a list such as 0-2,7."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def collect_facts(name: str) -> dict[str, object]:
    """The arguments, environment and core binding of this process."""
    environment, role = os.environ, name.partition("-")[0]
    assert environment["WEBRL_ROLE"] == name
    facts: dict[str, object] = {
        "name": name,
        "role": role,
        "index": int(environment["RANK"]) if role == "trainer" else None,
        "local_rank": int(environment["LOCAL_RANK"]) if role == "trainer" else None,
        "world": int(environment["WORLD_SIZE"]) if role == "trainer" else None,
        "slurm": [int(environment["SLURM_NODEID"]), environment["SLURMD_NODENAME"]],
        "devices": numbers(environment.get("CUDA_VISIBLE_DEVICES", "")),
        "cores": numbers(environment.get("WEBRL_CORES", "")),
        "bound": sorted(os.sched_getaffinity(0)),
        "meeting": [environment["MASTER_ADDR"], int(environment["MASTER_PORT"])],
        "pid": os.getpid(),
    }
    return facts


def check(facts: dict[str, object], placement: dict, host: str, port: int) -> None:
    """Compare with the placement. Raises AssertionError."""
    expected = next(each for each in placement["processes"] if each["name"] == facts["name"])
    assert facts["index"] in (None, expected["index"])
    facts |= {name: expected[name] for name in ("index", "node", "follower")}
    for name in ("role", "devices", "cores"):
        assert facts[name] == expected[name], f"{name} is {facts[name]}, not {expected[name]}"
    assert facts["slurm"][0] == expected["node"], f"Slurm says node {facts['slurm']}, not {expected['node']}"
    machine = set(range(os.cpu_count() or 1))
    expected_cores = sorted(machine & set(expected["cores"]))
    assert not expected_cores or facts["bound"] == expected_cores, f"bound to {facts['bound']}, not {expected_cores}"
    assert port == placement["control_port"], port
    if facts["role"] == "trainer":
        ranks = [each for each in placement["processes"] if each["role"] == "trainer"]
        assert (facts["local_rank"], facts["world"]) == (expected["local_rank"], len(ranks))
        first = next(each["port"] for each in ranks if each["index"] == 0)
        assert facts["meeting"] == [host, first], facts["meeting"]
    else:
        assert facts["meeting"] == ["127.0.0.1", expected["port"]], facts["meeting"]


def keep_to_ring(store: Store, facts: dict[str, object], placement: dict) -> str:
    """A node's first rollout process makes a segment of the ring's name; the others of the node find it there."""
    here = [each for each in placement["processes"] if each["node"] == facts["node"]]
    ring = placement["rings"][facts["node"]]
    path, mark = Path("/dev/shm") / ring["name"], str(facts["node"])
    if facts["name"] == next(each["name"] for each in here if each["role"] == "rollout"):
        with path.open("x") as segment:
            segment.write(mark)
        store.add(f"stubs/ring/{facts['node']}", 1)
        store.until("stubs/readers")
        store.until("stubs/read", *store.get("stubs/readers"))
        path.unlink()
    else:
        store.until(f"stubs/ring/{facts['node']}")
        assert path.read_text() == mark, f"{path} is that of node {path.read_text()}, not {mark}"
        store.add("stubs/read", 1)
    return ring["name"]


def main(arguments: list[str]) -> None:
    """[--fail NAME] role RUN_FOLDER NAME [--attempt N]."""
    fail = ""
    if arguments[0] == "--fail":
        fail, arguments = arguments[1], arguments[2:]
    command, folder, name = arguments[0], Path(arguments[1]), arguments[2]
    assert command == "role"
    facts = collect_facts(name)
    if facts["name"] == fail:
        sys.exit("it fails on purpose")
    placement = json.loads((folder / "placement.json").read_text())
    store = Store(folder / "control.json")
    check(facts, placement, store.address["host"], store.address["port"])
    everyone = [each["name"] for each in placement["processes"]]
    if facts["name"] == everyone[0]:
        store.put("stubs/readers", len(everyone) - placement["nodes"])  # all but the creator of each ring
    facts["ring"] = keep_to_ring(store, facts, placement)
    store.put(f"stubs/of/{facts['name']}", facts)
    store.add("stubs/arrived", 1)
    if facts["name"] != "trainer-0":
        store.until("stubs/over")
        return
    store.until("stubs/arrived", len(everyone))
    found = store.get(*(f"stubs/of/{name}" for name in everyone))
    (folder / "stubs.json").write_text(json.dumps(found))
    store.add("stubs/over", 1)
    store.put_if_absent("end", {"outcome": "finished", "role": "trainer-0"})


if __name__ == "__main__":
    main(sys.argv[1:])
