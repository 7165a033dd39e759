"""The table of predictions in docs/scaling.md, and the heads of the configurations."""

from __future__ import annotations

import pytest

from tools import prediction_table
from tools.prediction_table import HEAD, PAGE, ROOT

ROWS = {cells[1].strip().strip("`"): cells for line in PAGE.read_text().splitlines() if (cells := line.split("|"))[1:]}


def test_page_and_heads_say_what_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ROOT / "configs" / "8b_1node.yaml"
    assert prediction_table.main([str(quick)]) == 0
    *_, shown = capsys.readouterr().out.splitlines()
    assert shown.split("|") == ROWS["8b_1node"], "give again: python -m tools.prediction_table --write"
    for file in prediction_table.cluster_configurations():
        *_, training, mfu, every, hourly, gpu, _, _, _, limit, _ = ROWS[
            str(file.relative_to(ROOT / "configs").with_suffix(""))
        ]
        found = HEAD.search(file.read_text())
        if found is None or "Predicted" not in found[0]:
            assert file.parent.name == "published" or file.stem == "webgym_8b_4node", file
            continue
        words = " ".join(found[0].replace("#", " ").split())
        assert (
            f"{hourly.strip()} trained trajectories/h, {gpu.strip()} a GPU; an update every {every.strip()} s" in words
        )
        assert f"training takes {training.strip()} s, MFU {mfu.strip()}; limit: {limit.strip()}" in words.replace(
            "%", " %"
        )


def test_wrong_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert prediction_table.main([str(ROOT / "configs" / "quickstart.yaml")]) == 2
    assert "cluster.gpus_per_node=0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        prediction_table.main(["--write", "--card", "H200"])
