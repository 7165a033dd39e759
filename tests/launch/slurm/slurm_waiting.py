"""Stub of ranks and workers (STUB_COMMAND=) for jobs that Slurm or a user ends early.

`trainer-0` makes no update. It ends the job when a stop is requested, after writing a checkpoint's marker as a trainer
would, and with the outcome finished in a requeued job. --ignore-stop: the first launch ignores the request;
--no-checkpoint: every launch is pre-empted at once, without a checkpoint. --fail-NAME: the process NAME fails.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from slurm_payload import POLL_SECONDS, SECONDS, Store


def main(arguments: list[str]) -> None:
    """[--ignore-stop | --no-checkpoint | --fail-NAME] role RUN_FOLDER NAME [--attempt N]."""
    kind = arguments.pop(0) if arguments[0].startswith("--") else ""
    if kind == f"--fail-{os.environ['WEBRL_ROLE']}":
        sys.exit("it fails on purpose")
    run_folder = Path(arguments[1])
    store, requeued = Store(run_folder / "control.json"), os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    deadline = time.monotonic() + SECONDS
    while (facts := store.get("end", "stop"))[0] is None:
        stop = facts[1]
        assert time.monotonic() < deadline, "nobody ended the job"
        if os.environ["WEBRL_ROLE"] == "trainer-0":
            if kind == "--no-checkpoint":
                end(store, "preempted")
            elif requeued:
                end(store, "finished")
            elif stop is not None and kind != "--ignore-stop":
                folder = run_folder / "checkpoints"
                folder.mkdir(exist_ok=True)
                (folder / "latest").write_text("version-000001\n")
                end(store, stop)
        time.sleep(POLL_SECONDS)


def end(store: Store, outcome: str) -> None:
    """End the job."""
    store.put_if_absent("end", {"outcome": outcome, "role": "trainer-0"})


if __name__ == "__main__":
    main(sys.argv[1:])
