"""The picture of a plan is that of the plan."""

from __future__ import annotations

from tools.documentation.plan_drawing import Drawing, make_plan


def test_the_picture_of_a_plan_shows_every_row_that_an_engine_receives():
    drawing = Drawing(make_plan())
    rows = sum(piece.size[0] for _, engine, _, piece in drawing.slices if engine == 0)
    assert rows == drawing.receivers[0, 0][1]
