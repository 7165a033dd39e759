"""The picture of a run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from megatron_webrl.track import summary
from tools import draw_learning

SVG = "{http://www.w3.org/2000/svg}"


def update(version: int, success: float | None) -> dict[str, Any]:
    return {
        "version": version,
        "steps_mean": 1.5,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "extra": {"entropy": 0.4, **({"rollout_success_rate": success} if success is not None else {})},
    }


def evaluation(kind: str, version: int, success: float | None, variant: str = "") -> dict[str, Any]:
    interval = None if success is None else [success - 0.1, success + 0.1]
    return {"kind": kind, "variant": variant, "version": version, "success_of_judged": success, "interval": interval}


def test_each_kind_of_evaluation_has_a_dot_and_a_legend_entry():
    lines = [
        evaluation("before", 0, 0.4), evaluation("during", 1, 0.5), evaluation("after", 2, 0.6, "greedy"),
        evaluation("after", 2, None, "blank_images"),
    ]  # fmt: skip
    drawn = ElementTree.fromstring(draw_learning.draw_svg([update(1, 0.4), update(2, None)], lines))
    words = {text.text for text in drawn.iter(f"{SVG}text")}
    assert {"Success", "Steps", "Entropy", "Staleness", "before", "during", "greedy"} <= words
    assert "blank images" not in words
    groups = [group for group in drawn.iter(f"{SVG}g") if group.get("id", "").startswith(draw_learning.EVALUATION_ID)]
    dots = [float(dot.attrib["y"]) for group in groups for dot in group.iter(f"{SVG}use")]
    assert len(dots) == 3
    assert dots[1] > dots[2] > dots[0]  # more success is higher up


def test_a_thick_line_is_a_moving_average():
    assert draw_learning.moving_average([(1, 1.0), (2, 3.0)]) == [(1, 1.0), (2, 2.0)]
    assert draw_learning.moving_average([(n, float(n)) for n in range(8)])[-1] == (7, 5.0)


def test_a_run_is_drawn_from_its_files(tmp_path: Path):
    summary.open_updates(tmp_path).append(update(1, 0.25))
    draw_learning.main([str(tmp_path), str(tmp_path / "learning.svg")])
    assert (tmp_path / "learning.svg").read_text().startswith("<svg")
