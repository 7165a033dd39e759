"""What a policy of remember-sign-* notes and presses: read from the screenshots and responses of a run's episodes.

    python -m tools.bench.notes runs/quickstart --json notes.json

RUN has stored its episodes (`tracking.episodes_gib`). By environment and policy version: the success, how often the
last response presses the button of the sign that was shown, or answers with its name (as the success, unless a judge
errs), how often the first notes the sign that it sees, and how often the last presses or answers what the note in its
prompt says, the one before its own. With 95 % intervals (Wilson, over episodes).
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from rich.console import Console
from rich.table import Table

from megatron_webrl.config.load import parse_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.segment import RecordError
from megatron_webrl.tasks.remember_sign import SCRIPT
from megatron_webrl.track.episodes import TRAINING, read_episodes
from megatron_webrl.track.evaluations import share_of
from megatron_webrl.types import COORDINATE_RANGE, Trajectory
from tools.arguments import bounded_number, make_bench_parser, write_json

COLOURS = {"red": (208, 32, 32), "blue": (32, 64, 208), "yellow": (232, 184, 0), "black": (32, 32, 32)}
MARK = (255, 0, 255)
FIRST_ROW = 50  # below the instruction
REACH = 24  # pixels from a click to the drawing on its button
NOTE = re.compile(r"Memory: (\w+ \w+);")


def signs_of(picture: Image.Image) -> dict[str, np.ndarray]:
    """The pixels of the signs of a screenshot by colour, bool [height, width]; letters are thinner than a sign."""
    pixels, found = np.asarray(picture).astype(int), {}
    for name, colour in COLOURS.items():
        near = np.abs(pixels - colour).sum(-1) < 20
        around = Image.fromarray(near.astype(np.uint8) * 255).filter(ImageFilter.BoxBlur(8))
        near &= np.asarray(around) > 0.25 * 255
        near[:FIRST_ROW] = False
        if near.any():
            found[name] = near
    return found


def sign_near(image: bytes, x: float, y: float, reach: float) -> str | None:
    """The sign, such as "red circle", nearest to a point of a screenshot, all in pixels; None without one in reach."""
    picture = Image.open(io.BytesIO(image)).convert("RGB")
    nearest: tuple[float, str, tuple[int, int]] | None = None
    for name, near in signs_of(picture).items():
        rows, columns = np.nonzero(near)
        distances = np.hypot(columns - x, rows - y)
        first = int(distances.argmin())
        if distances[first] <= reach and (nearest is None or distances[first] < nearest[0]):
            nearest = float(distances[first]), name, (int(columns[first]), int(rows[first]))
    if nearest is None:
        return None
    _, name, place = nearest
    ImageDraw.floodfill(picture, place, MARK, thresh=60)
    rows, columns = np.nonzero((np.asarray(picture) == MARK).all(-1))
    box = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
    return f"{name} {'square' if len(rows) > 0.9 * box else 'circle'}"  # a circle fills 0.79 of its box


@dataclass(frozen=True)
class NotedEpisode:
    """What an episode of remember-sign-* showed, noted and pressed; None where there is no sign."""

    environment: str
    kind: str  # TRAINING, or the name of an evaluation
    version: int  # policy
    success: bool
    sign: str | None
    first_note: str | None
    carried_note: str | None
    pressed: str | None  # or answered


def read_episode(trajectory: Trajectory, kind: str, processor: Processor) -> NotedEpisode:
    """Read one episode; `processor` is that of its tokens."""
    first, carried, last = trajectory.steps[0], trajectory.steps[-2:][0], trajectory.steps[-1]
    notes = [NOTE.match(str(processor.tokenizer.decode(step.response_token_ids))) for step in (first, carried)]
    first_note, carried_note = (note and note[1] for note in notes)
    pressed = trajectory.answer
    if last.action is not None and last.action.coordinate is not None:
        image = trajectory.images[last.images[-1]]
        width, height = Image.open(io.BytesIO(image)).size
        x, y = (value / COORDINATE_RANGE for value in last.action.coordinate)
        pressed = sign_near(image, x * width, y * height, REACH)
    return NotedEpisode(
        environment=trajectory.task.environment, kind=kind, version=trajectory.oldest_version or 0,
        success=trajectory.outcome == "success",
        sign=sign_near(trajectory.images[first.images[-1]], 0, FIRST_ROW, COORDINATE_RANGE),
        first_note=first_note, carried_note=carried_note, pressed=pressed,
    )  # fmt: skip


def figures_of(episodes: Sequence[NotedEpisode]) -> dict[str, Any]:
    """Success, P(press = sign) and P(note = sign) where a sign is shown, P(press = note) where one was pressed last."""
    pressed, shown = ([each for each in episodes if getattr(each, name)] for name in ("pressed", "sign"))
    return {
        "success": share_of([each.success for each in episodes]),
        "press_is_sign": share_of([each.pressed == each.sign for each in shown]),
        "note_is_sign": share_of([each.first_note == each.sign for each in shown]),
        "press_is_note": share_of([each.carried_note == each.pressed for each in pressed]),
    }


def text_of(found: Mapping[str, Any]) -> str:
    """`25 % (18-34)`."""
    if found["share"] is None:
        return "-"
    low, high = (100 * value for value in found["interval"])
    return f"{100 * found['share']:.0f} % ({low:.0f}-{high:.0f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_bench_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, whose episodes are pooled")
    parser.add_argument(
        "--updates", type=bounded_number(int, 1), default=10, metavar="N",
        help="updates of each row of training episodes (default: 10)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    rows: dict[tuple[str, str, int], list[NotedEpisode]] = {}
    try:
        for run in options.runs:
            processor = Processor.load(parse_config(run / "config.yaml").model.path)
            for stored in read_episodes(run):
                trajectory = stored.trajectory
                if not trajectory.task.environment.startswith(SCRIPT) or not trajectory.steps:
                    continue
                each = read_episode(trajectory, stored.kind, processor)
                first = each.version // options.updates * options.updates if each.kind == TRAINING else 0
                rows.setdefault((each.environment, each.kind, first), []).append(each)
    except (OSError, ValueError, RecordError) as error:
        sys.exit(f"notes: {error}")
    if not rows:
        sys.exit(f"notes: no stored episodes of {SCRIPT}-* in {', '.join(map(str, options.runs))}")
    shares = ("success", "press = sign", "note = sign", "press = note")
    table, found = Table("environment", "episodes of", "episodes", *shares), []
    for (environment, kind, first), episodes in sorted(rows.items()):
        figures = figures_of(episodes)
        name = f"versions {first} to {first + options.updates - 1}" if kind == TRAINING else kind
        found.append({"environment": environment, "episodes": name, **figures})
        table.add_row(environment, name, str(len(episodes)), *map(text_of, figures.values()))
    Console().print(table)
    write_json(options.json, found)


if __name__ == "__main__":
    main()
