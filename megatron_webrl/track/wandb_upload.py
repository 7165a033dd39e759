"""Upload a run to W&B, or write it for `wandb sync`, in wandb/ of its folder. W&B's variables say where, and how.

W&B's own step only counts: the x axis is the metric `update`. A resume continues the run by its id, and after a
rollback W&B keeps both values of an update. Offline it cannot: a folder that is synced replaces the earlier ones of its
id. Therefore an offline resume, or a rollback, writes another folder with the whole run.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from megatron_webrl.config.setting import flatten_config
from megatron_webrl.track.upload import END_SECONDS, REQUEST_SECONDS, Point, Uploader
from megatron_webrl.util.text import redact

if TYPE_CHECKING:
    from wandb import Run

STEP = "update"
OFFLINE = ("offline", "dryrun", "disabled")  # modes without an account


class WandbUploader(Uploader):
    """Gives metrics to W&B's process, which stores them before it sends them."""

    sink = "wandb"
    _run: Run | None = None

    @property
    def address(self) -> str:
        return str(self.folder / "wandb")

    def open(self) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # takes seconds

        offline = wandb.setup().settings.mode in OFFLINE
        if not offline and not wandb.login(prompt=False, verify=False):  # otherwise a terminal would be asked
            raise PermissionError("no account; set WANDB_API_KEY, call `wandb login`, or set WANDB_MODE=offline")
        settings = wandb.Settings(
            console="off", save_code=False, disable_code=True, disable_git=True, x_disable_meta=True,
            x_disable_machine_info=True, x_disable_stats=True, x_save_requirements=False,
            init_timeout=REQUEST_SECONDS, finish_timeout=END_SECONDS, finish_timeout_raises=True,
        )  # fmt: skip
        project = os.environ.get("WANDB_PROJECT") or self.config.tracking.experiment
        self._run = wandb.init(
            project=project, name=self.config.run.name, id=self.state.key, resume="allow", dir=str(self.folder),
            notes=f"files: {self.folder.absolute()}", reinit="create_new", settings=settings,
        )  # fmt: skip
        self.rewinds = offline
        self.forget(None if offline else self.state.marks, run_id=self.state.key)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def describe(self) -> None:
        values = {key: value if isinstance(value, bool | int | float) else redact(str(value))
                  for key, value in flatten_config(self.config).items()}  # fmt: skip
        self.run.config.update(values, allow_val_change=True)

    def log(self, point: Point) -> None:
        self.run.log({**point.metrics, STEP: point.step, "_timestamp": point.time})
        self.run.summary.update(point.tags)

    def end(self, status: str, milliseconds: int) -> None:
        run, self._run, self._is_open = self.run, None, False
        run.summary["status"] = status
        run.finish(exit_code=int(status == "FAILED"))

    def close(self) -> None:
        run, self._run, self._is_open = self._run, None, False
        with suppress(Exception):  # the failure before is reported
            if run is not None:
                run.finish(exit_code=1)

    @property
    def run(self) -> Run:
        assert self._run is not None
        return self._run


UPLOADER = WandbUploader
