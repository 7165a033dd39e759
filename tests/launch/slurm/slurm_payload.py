"""Stub of a trainer rank or rollout worker (STUB_COMMAND=) for jobs that end at once or early.

`trainer-0` makes no update. It ends the job when a stop is requested, after writing a checkpoint's marker as a trainer
would, and with the outcome finished in a requeued job. --finish: it ends the job at once; --ignore-stop: the first
launch ignores the request; --no-checkpoint: every launch is pre-empted at once, without a checkpoint. --fail-NAME: the
process NAME fails.
"""

import os
import sys
import time
from pathlib import Path

from megatron_webrl.control.client import ControlClient

SECONDS = 150.0


def main(arguments: list[str]) -> None:
    """[--KIND] role RUN_FOLDER NAME [--attempt N]."""
    kind = arguments.pop(0) if arguments[0].startswith("--") else ""
    folder, name = Path(arguments[1]), arguments[2]
    assert os.environ["WEBRL_ROLE"] == name
    if kind == f"--fail-{name}":
        sys.exit("it fails on purpose")
    control, requeued = ControlClient(folder / "control.json", name), os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    deadline = time.monotonic() + SECONDS
    while control.job_end() is None:
        assert time.monotonic() < deadline, "nobody ended the job"
        if name == "trainer-0":
            if kind == "--no-checkpoint":
                control.end_job("preempted")
            elif requeued or kind == "--finish":
                control.end_job("finished")
            elif control.stop_requested() and kind != "--ignore-stop":
                (folder / "checkpoints").mkdir(exist_ok=True)
                (folder / "checkpoints" / "latest").write_text("version-000001\n")
                control.end_job(control.requested_outcome())
        time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1:])
