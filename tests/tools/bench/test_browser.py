"""The benchmark of browsers: what it measures, keeps and draws."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.bench import browser
from tools.bench.browsers.report import Measurement, Ratio, Section, ratio_to


def table(shown: str) -> str:
    """Without what only a run that measures says."""
    return shown[shown.index("Browsers") :].split("\nBrowserGym is left out")[0].strip()


def test_a_quick_run_measures_every_section_and_another_one_shows_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, plots = tmp_path / "figures.json", tmp_path / "plots.svg"
    browser.main(["--quick", "--json", str(figures), "--plots", str(plots)])
    shown = capsys.readouterr().out
    kept = json.loads(figures.read_text())["sections"]
    assert list(kept) == list(browser.SECTIONS)
    for section in kept.values():
        assert section["title"] in shown
        for row in section["rows"]:
            assert row["name"] in shown
            assert row["values"], row["name"]
            # A straight line through two points may lie anywhere, and a clock of CPU time ticks slowly.
            assert row["median"] > 0 or "session" in row["name"] or "CPU" in row["name"], row["name"]
    assert "--browsergym-python names the interpreter" in shown
    drawn = ElementTree.fromstring(plots.read_text())
    titles = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert titles >= {"A fresh episode", "A step", "Memory", "Waiting", "Screenshots"}
    browser.main(["--add", str(figures), "--plots", str(tmp_path / "again.svg")])
    assert table(capsys.readouterr().out) == table(shown)
    assert (tmp_path / "again.svg").read_text() == plots.read_text()


def test_a_ratio_says_whether_its_goal_is_met() -> None:
    assert str(ratio_to([1.0, 2.0, 3.0], [8.0, 6.0, 1.0], "the peer", 3.0)) == "3.00 x the peer (goal 3: met)"
    assert str(Ratio("the peer", 0.9, 1 / 1.1)) == "0.90 x the peer (goal 0.909: missed)"


def test_a_section_survives_being_kept() -> None:
    row = Measurement("a step", "ms", (1.0, 2.0, 4.0), (Ratio("the peer", 2.0, 3.0),))
    section = Section("a title", {"viewport": "1x1"}, [row], ["a note"], {"points": [1, 2]})
    again = Section.from_json(json.loads(json.dumps(section.to_json())))
    assert again == section
    assert (again.measurement("a step").median, again.measurement("a step").quartiles) == (2.0, (1.5, 3.0))
    with pytest.raises(KeyError):
        section.measurement("a stride")
