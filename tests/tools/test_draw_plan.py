"""The picture of a plan is that of the plan."""

from __future__ import annotations

from pathlib import Path

from tools.draw_plan import Drawing, make_plan


def test_the_picture_in_the_docs_is_what_the_planner_plans():
    drawing = Drawing(make_plan())
    rows = sum(piece.size[0] for _, engine, _, piece in drawing.slices if engine == 0)
    assert rows == drawing.receivers[0, 0][1]
    assert Path("docs/images/plan.svg").read_text() == drawing.svg(), "make docs draws it anew"
