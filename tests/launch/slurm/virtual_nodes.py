"""Virtual nodes on one Linux machine, isolated like separate machines by namespaces.

A node has its own host name, address, /etc/hosts, /dev/shm, /tmp, process ids and monotonic clock. Its network card is
one end of a veth pair; the other end is a port of the cluster's bridge. The bridge lies in a network namespace of the
cluster, made by `enter_network`, so that names and addresses of two clusters never conflict; it disappears with its
last process. Nodes share the file system except /tmp, of which they share only the folders in `shared`.

`python -I -S tests/launch/slurm/virtual_nodes.py ...` is process 1 of a node: it sets the node up,
runs the node's daemon, and reaps orphans. When it ends, the kernel kills every other process of the node.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

PROGRAMS = ("ip", "unshare", "nsenter")
NETWORK = "10.77"  # of /16: seen by the cluster's own processes only
BRIDGE, CARD = "bridge", "eth0"
SETUP_SECONDS = 20.0
_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


def address(number: int) -> str:
    """The address of node `number`, from 1; of number 0 that of the host, which has no node."""
    return f"{NETWORK}.{number // 250}.{number % 250 + 1}"


def enter_network() -> None:
    """Take this process into a new network with a bridge; what it starts is there, too. Raises OSError."""
    _unshare(_CLONE_NEWNET, "network")
    for arguments in (
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {address(0)}/16 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ):
        _ip(arguments)


def command(
    name: str, number: int, nodes: Sequence[str], shared: Sequence[Path], folder: Path, daemon: Sequence[str]
) -> list[str]:
    """What starts node `number` called `name`: to be run in the cluster's network, followed by `connect`.

    `nodes`: names of all; `folder`: where the node's own files lie on the host; `daemon`: what it runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hosts = [f"127.0.0.1 localhost\n{address(0)} {socket.gethostname()}\n"]
    hosts += [f"{address(each)} {node}\n" for each, node in enumerate(nodes, 1)]
    (folder / "hosts").write_text("".join(hosts))
    # Fails at once for unknown names; an unreachable name server would take seconds.
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    places = [str(path.absolute()) for path in shared]
    clock = ["--time", f"--monotonic={number * 100_000}"]
    if subprocess.run(["unshare", *clock, "true"], stderr=subprocess.DEVNULL, check=False).returncode:
        clock = []  # an old kernel
    return [
        *("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *clock,
        *(sys.executable, "-I", "-S", str(Path(__file__).absolute()), name, address(number), str(folder)),
        *(":".join(places), *daemon),
    ]


def connect(name: str, holder: int) -> int:
    """Give the node whose `command` runs as process `holder` its card; returns the node's process 1.

    Raises AssertionError if the node does not come up.
    """
    deadline = time.monotonic() + SETUP_SECONDS
    while not (first := first_process(holder)):
        assert time.monotonic() < deadline, f"node {name} did not start within {SETUP_SECONDS:.0f} s"
        time.sleep(0.01)
    subprocess.run(["ip", "link", "del", _port(name)], capture_output=True, check=False)  # of a node that died
    _ip(f"link add {_port(name)} type veth peer name {CARD} netns {first}")
    _ip(f"link set {_port(name)} master {BRIDGE} up")
    return first


def first_process(holder: int) -> int:
    """Process 1 of the node that `holder` keeps, as a number of this machine; 0 if there is none."""
    try:
        return int(Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0


def within(network_of: int) -> list[str]:
    """What a command begins with that is to run in the network of a process."""
    return ["nsenter", f"--net=/proc/{network_of}/ns/net"]


def set_link(network_of: int, name: str, up: bool) -> None:
    """Plug a node's cable in or out, at the bridge that `network_of` shares."""
    _ip(f"link set {_port(name)} {'up' if up else 'down'}", *within(network_of))


def space_of(pid: int, kind: str = "pid") -> int:
    """What names a process's namespace; by default that of its node's process numbers. 0: there is no such process."""
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0  # gone, or of another user of this machine


def members(space: int) -> list[int]:
    """Every process of the node that `space_of` has named, as numbers of this machine."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if space and space_of(pid) == space]


def _port(name: str) -> str:
    return f"to-{name}"


def _ip(arguments: str, *before: str) -> None:
    done = subprocess.run([*before, "ip", *arguments.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {arguments}: {done.stderr.strip()}"


def main() -> int:
    """Be process 1 of a node until its daemon ends."""
    name, own, folder, shared, *daemon = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _power_off)
    _set_up(name, own, Path(folder), [place for place in shared.split(":") if place])
    # The marks of the host's processes name numbers that mean others here.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WEBRL_")}
    process = subprocess.Popen(daemon, env=environment)
    while True:
        ended, status = os.wait()
        if ended == process.pid:
            return os.waitstatus_to_exitcode(status) & 0xFF


def _set_up(name: str, own: str, folder: Path, shared: Sequence[str]) -> None:
    socket.sethostname(name)
    _mount("", "/", flags=_MS_PRIVATE | _MS_REC)
    for own_file in ("hosts", "resolv.conf"):
        if os.path.exists(f"/etc/{own_file}"):
            _mount(str(folder / own_file), f"/etc/{own_file}", flags=_MS_BIND)
    _mount("tmpfs", "/dev/shm", kind="tmpfs")
    _empty_tmp([place for place in shared if Path(place).is_relative_to("/tmp")])
    os.chdir("/")
    _ip("link set lo up")
    deadline = time.monotonic() + SETUP_SECONDS
    while f"{CARD}:" not in Path("/proc/net/dev").read_text():
        assert time.monotonic() < deadline, f"{name} was given no network card within {SETUP_SECONDS:.0f} s"
        time.sleep(0.01)
    for arguments in (f"addr add {own}/16 dev {CARD}", f"link set {CARD} up", f"route add default via {address(0)}"):
        _ip(arguments)


def _empty_tmp(places: Sequence[str]) -> None:
    """A /tmp of the node's own, empty but for some folders."""
    opened = [(place, os.open(place, os.O_PATH | os.O_DIRECTORY)) for place in places]
    _mount("tmpfs", "/tmp", kind="tmpfs")
    for place, descriptor in opened:
        os.makedirs(place, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", place, flags=_MS_BIND | _MS_REC)
        os.close(descriptor)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()):
        raise OSError(ctypes.get_errno(), f"mount {source} {target}: {os.strerror(ctypes.get_errno())}")


def _unshare(flags: int, kind: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), f"no {kind} namespace: {os.strerror(ctypes.get_errno())}")


def _power_off(number: int, frame: FrameType | None) -> None:
    os._exit(0)  # and the kernel kills the rest


if __name__ == "__main__":
    sys.exit(main())
