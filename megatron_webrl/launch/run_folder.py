"""The folder of a run: its files that every process of a job reads, and its preparation for a launch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_webrl.config.import_path import OWN_CODE_FILE, files_of
from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control import child_process
from megatron_webrl.control.connection import ControlAddress
from megatron_webrl.monitor.control_probe import query
from megatron_webrl.placement.placement import Placement
from megatron_webrl.ring.segment import sweep_segments
from megatron_webrl.track.run_lock import Launch, start_launch
from megatron_webrl.util import atomic_file

PLACEMENT_FILE = "placement.json"
SHARED_MEMORY = Path("/dev/shm")
ENGINE_SEGMENTS = "vllm_dist_*cpushm*"  # of vLLM's communicator of CPU ranks, which leaves them if it is killed


class RoleStartError(RuntimeError):
    """A role did not start. The message names it."""


def config_path(config: Config) -> Path:
    """Path of the resolved configuration that every role reads."""
    return config.run_folder / "config.yaml"


def control_address_path(config: Config) -> Path:
    """Path of the file that holds the control service's address."""
    return config.run_folder / "control.json"


def report_folder(config: Config) -> Path:
    """The folder with a JSON file for each node that `webrl check node` has checked."""
    return config.run_folder / "nodes"


def write_job(config: Config, placement: Placement) -> None:
    """Write the configuration and the placement, which every process of the job reads."""
    save_config(config, config_path(config))
    if own := files_of(config):
        atomic_file.write_json(config.run_folder / OWN_CODE_FILE, own, indent=1)
    atomic_file.write_json(config.run_folder / PLACEMENT_FILE, placement.to_json(), indent=1)


def read_placement(config: Config) -> Placement:
    """The placement of the job in a run's folder. Raises ConfigError without one."""
    path = config.run_folder / PLACEMENT_FILE
    try:
        return Placement.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; prepare the job first: webrl node prepare CONFIG") from None


@contextmanager
def prepared_run_folder(
    config: Config,
    placement: Placement,
    report: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Launch]:
    """Make the run's folder, write the job's files, and hold the run's lock; an earlier run of this name is renamed,
    unless resumed.

    The launch is that of the Slurm job of `environment`, or of this process. Raises ConfigError while another job runs
    in the folder.
    """
    folder, environment = config.run_folder, environment or {}
    if not config.run.resume and folder.exists():
        check_ended(config)
        with start_launch(folder, environment):  # keeps out what is left of the earlier run
            number = next(n for n in range(1, 1_000_000) if not folder.with_name(f"{folder.name}.{n}").exists())
            backup = folder.with_name(f"{folder.name}.{number}")
            folder.rename(backup)
        report(f"renamed the earlier run of this name to {backup}")
    with start_launch(folder, environment) as launch:
        (folder / "logs").mkdir(exist_ok=True)
        atomic_file.remove_leftovers(folder, 0.0)  # nobody else writes in a folder with this lock
        for old in (folder / "summary.json", control_address_path(config)):
            old.unlink(missing_ok=True)
        write_job(config, placement)
        yield launch


def check_ended(config: Config) -> None:
    """Raise ConfigError if the job in the run's folder runs: its control service answers.

    That of a job on one machine answers on this machine only.
    """
    address = ControlAddress.read(control_address_path(config))
    if address is None:
        return
    status = query(control_address_path(config))
    if not isinstance(status, str) and status["end"] is None:
        raise ConfigError(
            f"run.name={config.run.name}: a job runs in {config.run_folder}, its control service at "
            f"{address.host}:{address.port} answers; wait for its end, or choose another run.name"
        )


def wait_for_control_address(
    path: Path, seconds: float, poll_failure: Callable[[], str | None] = lambda: None
) -> ControlAddress:
    """Wait for the address of the control service and return it. Raises RoleStartError after `seconds`."""
    deadline = time.monotonic() + seconds
    while (address := ControlAddress.read(path)) is None:
        if failure := poll_failure():
            raise RoleStartError(failure)
        if time.monotonic() > deadline:
            raise RoleStartError(f"the control service did not start within {seconds:.0f} s")
        time.sleep(0.02)
    return address


def sweep_leftovers() -> str:
    """Remove processes, shared memory and scratch folders of killed runs; returns a message, empty without any."""
    removed = child_process.sweep_orphans() + sweep_shared_memory() + child_process.sweep_scratch()
    return f"removed leftovers of a killed run: {', '.join(removed)}" if removed else ""


def sweep_shared_memory(prefix: str = "webrl-") -> list[str]:
    """Remove the rings with this prefix, and segments of engines, that no process uses; returns their names."""
    return sweep_segments(prefix) + sweep_engine_segments()


def sweep_engine_segments(folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove the segments of this user that no process maps; returns their names."""
    found, mapped = sorted(folder.glob(ENGINE_SEGMENTS)), ""
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with suppress(OSError):  # it ended, or belongs to another user, who cannot map our files
            mapped += maps.read_text(errors="replace")
    unused = [path for path in found if path.lstat().st_uid == os.geteuid() and str(path) not in mapped]
    for path in unused:
        path.unlink(missing_ok=True)
    return [path.name for path in unused]
