"""The MLflow run of a training run: parameters, metrics, the configuration, a few trajectories.

The trainer only appends to mlflow.jsonl; a thread sends the entries, so an MLflow that is slow or does not answer costs
no time. What it has not received at the end, `webrl upload` sends.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping

from megatron_webrl.config.load import flatten_config
from megatron_webrl.config.schema import Config
from megatron_webrl.track.metrics import UpdateMetrics
from megatron_webrl.track.mlflow_journal import FILE, SUMMARY, Entry, now_ms, status_entry
from megatron_webrl.track.mlflow_upload import Uploader
from megatron_webrl.util.history import History
from megatron_webrl.util.redaction import redact
from megatron_webrl.util.text import first_line, shorten

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # before the first repetition; doubles up to MAX_RETRY_SECONDS
MAX_RETRY_SECONDS = 60.0
END_SECONDS = 20.0  # limit of waiting for MLflow at the end of a job
FAILED_END_SECONDS = 2.0  # limit of that after a failure of the trainer


class MLflowTracker:
    """Logs one MLflow run. No method waits for MLflow but `close`, which has a limit, and none raises what it raises.

    Invariant: entries are in mlflow.jsonl before they are sent, in order, and mlflow.json says which MLflow has.
    """

    def __init__(self, config: Config, resume: str | None) -> None:
        """Continue the run that the folder names, else the one with id `resume`, else create one."""
        self.config = config
        self.journal, self.uploader = History(config.run_folder / FILE), Uploader(config, resume)
        self.error: str | None = None  # of the last request, while MLflow does not answer
        self._wake, self._closing = threading.Event(), threading.Event()
        if not self.journal.size and resume is None:
            parameters = {key: redact(str(value))[:500] for key, value in flatten_config(config).items()}
            self._append({"params": parameters}, {"artifact": "config.yaml", "folder": ""})
        else:
            self._append(status_entry("RUNNING"))
        self.thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        self.thread.start()

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until MLflow has answered."""
        return self.uploader.state.run_id

    def log_update(self, update: UpdateMetrics) -> None:
        self.log_metrics(update.mlflow_metrics(), update.version)

    def log_metrics(self, values: Mapping[str, float], version: int) -> None:
        """Log metrics with the policy version as the MLflow step."""
        self._append({"metrics": dict(values), "step": version, "time": now_ms()})

    def set_tag(self, name: str, value: str) -> None:
        self._append({"tags": {name: value}})

    def close_failed(self) -> None:
        """End the run of a trainer that failed, whose launcher waits only shortly."""
        self.close("FAILED", FAILED_END_SECONDS)

    def close(self, status: str, seconds: float | None = None) -> None:
        """Log the summary and end the run with an MLflow status: FINISHED, KILLED or FAILED.

        Waits for MLflow for at most `seconds`, by default END_SECONDS, then logs what it has not received and how to
        send it.
        """
        if os.path.isfile(self.config.run_folder / "summary.json"):  # False on a disk that fails
            self._append(SUMMARY)
        self._append(status_entry(status))
        self._closing.set()
        self._wake.set()
        self.thread.join(END_SECONDS if seconds is None else seconds)
        if message := self.pending_message():
            log.warning("%s", message)

    def pending_message(self) -> str | None:
        """What MLflow has not received, and how to send it; None if it has everything."""
        try:
            count = self.uploader.pending()
        except OSError as error:
            return f"{self.journal.path} cannot be read, so that MLflow may lack its last entries: {error}"
        unwritten = self.journal.unwritten[1].count("\n")
        if not count + unwritten:
            return None
        lost = f", {unwritten} of which could not be written there" if unwritten else ""
        return (
            f"MLflow at {redact(self.config.tracking_uri)} has not received {count + unwritten} entries of "
            f"{self.journal.path}{lost}{f' ({self.error})' if self.error else ''}; "
            f"send {'the others' if lost else 'them'} with: webrl upload {self.config.run_folder}"
        )

    def _append(self, *entries: Entry) -> None:
        self.journal.append(*entries)
        self._wake.set()

    def _send_all(self) -> None:
        """Send entries as they come. After a failure wait, longer each time, and try again."""
        delay = RETRY_SECONDS
        while True:
            self._wake.clear()
            closing = self._closing.is_set()
            try:
                while self.uploader.send_some():
                    delay = RETRY_SECONDS
                    self._note(None)
            except Exception as error:  # of MLflow, its database or the network: none may end training
                self._note(error)
                if closing:
                    return
                self._closing.wait(delay)
                delay = min(2 * delay, MAX_RETRY_SECONDS)
                continue
            if closing:
                return
            self._wake.wait()

    def _note(self, error: Exception | None) -> None:
        """Log the first failure in a row, and its end."""
        text = None if error is None else shorten(f"{type(error).__name__}: {first_line(error)}", 300)
        if text is not None and self.error is None:
            uri, path = self.config.tracking_uri, self.journal.path
            log.warning("MLflow at %s does not answer; entries wait in %s: %s", uri, path, text)
        elif text is None and self.error is not None:
            log.info("MLflow at %s answers again", self.config.tracking_uri)
        self.error = text
