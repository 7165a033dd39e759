"""The profiles of a run (trainer/profile.py) as events of its trace: processes of their own, at their time."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.track.timeline import PROFILE_MARK

Event = dict[str, Any]
_NAMES = ("process_name", "thread_name")


def profile_events(path: Path, label: str, first_process: int, start: float, seconds: float) -> list[Event]:
    """The events of a profile whose span began at `start`, in microseconds of the trace, and took `seconds`.

    Its mark encloses the span: in the middle, its time is known to half of what it is longer. The processes get numbers
    from `first_process` on, and `label` in their names. Raises ConfigError.
    """
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        mark = next(event for event in events if event.get("name") == PROFILE_MARK)
        shift = start - mark["ts"] - max(0.0, mark["dur"] - seconds * 1e6) / 2
        chosen = [event for event in events if event["ph"] in "Xsf" or event["name"] in _NAMES]
        rows = sorted({(str(event["pid"]), str(event["tid"])) for event in chosen})
    except (OSError, EOFError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise ConfigError(f"{path} is no profile of torch: {type(error).__name__}: {error}") from None
    processes = {process: first_process + n for n, process in enumerate(sorted({process for process, _ in rows}))}
    threads = {row: n for n, row in enumerate(rows)}
    return [_moved(event, path.name, label, processes, threads, shift) for event in chosen]


def _moved(
    event: Event, file: str, label: str, processes: dict[str, int], threads: dict[tuple[str, str], int], shift: float
) -> Event:
    process, thread = str(event["pid"]), str(event["tid"])
    moved = event | {"pid": processes[process], "tid": threads[process, thread]}
    if event["ph"] == "M":
        name = event["args"]["name"]
        return moved | {"ts": 0, "args": {"name": f"{label}, {name}" if event["name"] == _NAMES[0] else name}}
    if event["ph"] in "sf":
        moved["id"] = f"{file}/{event['id']}"
    return moved | {"ts": round(event["ts"] + shift, 3)}
