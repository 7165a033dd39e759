"""Write the metrics of a run for TensorBoard, in tensorboard/ of its folder.

Each opening writes a file of its own. It begins with the step from which TensorBoard discards what earlier files have:
a line that is written twice, and lines that a rollback has replaced, are shown once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_webrl.config.setting import flatten_config
from megatron_webrl.track.upload import METRICS, Point, Uploader
from megatron_webrl.util import history
from megatron_webrl.util.clock import steady_time
from megatron_webrl.util.history import Tail
from megatron_webrl.util.text import redact

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

FOLDER = "tensorboard"


class TensorBoardUploader(Uploader):
    """Writes records at once: the writer of the package `tensorboard` has a thread, which hides errors of the disk."""

    sink, rewinds = "tensorboard", True
    _writer: RecordWriter | None = None
    _first_step = 0  # of the open file

    @property
    def address(self) -> str:
        return str(self.folder / FOLDER)

    def open(self) -> None:
        """Open a new file for the lines from the first step that was not sent."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        step = self._rewind()
        folder = self.folder / FOLDER
        folder.mkdir(exist_ok=True)
        number = 1 + max((int(path.suffix[1:]) for path in folder.glob("events.out.tfevents.*")), default=0)
        self._writer = RecordWriter((folder / f"events.out.tfevents.{number:08d}").open("xb"))
        self._write(file_version="brain.Event:2")
        if step is not None:
            self._write(step=step, session_log={"status": "START"})
        self._first_step = step or 0

    def describe(self) -> None:
        settings = flatten_config(self.config).items()
        self._write_text("settings", "\n".join(f"    {key}: {redact(str(value))}" for key, value in settings))

    def log(self, point: Point) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in point.metrics.items()]
        self._write(wall_time=point.time, step=point.step, summary={"value": values})
        for name, text in point.tags.items():
            self._write_text(name, text, point.step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def end(self, status: str, milliseconds: int) -> None:
        self._write_text("status", status)
        self.close()

    def close(self) -> None:
        writer, self._writer, self._is_open = self._writer, None, False
        if writer is not None:
            writer.close()

    def _rewind(self) -> int | None:
        """Forget the lines from the first step that was not sent, which is returned; None if all lines were sent."""
        unsent = [line for name in METRICS for line in Tail(self.folder / name, self.state.marks.get(name, ())).poll()]
        step = min((line["version"] for line in unsent if "version" in line), default=None)
        marks: dict[str, Any] = {}
        for name, sent in self.state.marks.items() if step is not None else ():
            size = history.kept_size(self.folder / name, lambda line: line["version"] < step)
            marks[name] = [mark for mark in sent if mark[1] <= size]
            if size and not marks[name]:  # more lines than there are marks
                self.forget()
                return 0
        self.forget(marks if step is not None else self.state.marks)
        return step

    def _write_text(self, name: str, text: str, step: int | None = None) -> None:
        metadata = {"plugin_data": {"plugin_name": "text"}}
        tensor = {"dtype": "DT_STRING", "string_val": [text.encode()], "tensor_shape": {"dim": [{"size": 1}]}}
        value = {"tag": f"{name}/text_summary", "metadata": metadata, "tensor": tensor}
        self._write(step=self._first_step if step is None else step, summary={"value": [value]})

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        assert self._writer is not None
        self._writer.write(Event(**{"wall_time": steady_time(), **fields}).SerializeToString())


UPLOADER = TensorBoardUploader
