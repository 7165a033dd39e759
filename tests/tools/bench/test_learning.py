"""The comparison of learning runs: what it reads from a run, shows and puts together."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.launch.validation import load_config
from tools.bench import learning


def a_run(folder: Path, *, evaluated_before: bool = True, is_old: bool = False) -> Path:
    folder.mkdir()
    updates = [
        {
            "version": n + 1, "clip_fraction": 0.1, "response_tokens_mean": 8.0,
            "extra": {"entropy": 0.5 - n / 20, "rollout_success_rate": n / 10, "steps_mean/success": 1.0},
        }
        for n in range(8)
    ]  # fmt: skip
    gain = {"mean": 0.3, "interval": [0.2, 0.4], "tasks": 100}
    evaluation = {
        "before": {"success_of_judged": 0.4} if evaluated_before else None,
        "after": {"success_of_judged": 0.7},
        "gain": gain if evaluated_before else None,
        "image_gain": gain,
        **({"blank_images": {"success_of_judged": 0.4}} if is_old else {"after_blank_images": None}),
    }
    (folder / "summary.json").write_text(json.dumps({"updates": updates, "evaluation": evaluation}))
    return folder


@pytest.mark.parametrize("is_old", [False, True])
def test_first_and_last_updates_are_compared(tmp_path: Path, is_old: bool):
    found = learning.read_result("rewards", 0, a_run(tmp_path / "run", is_old=is_old), None, 90.0)
    assert (found.before, found.after, found.minutes) == (0.4, 0.7, 1.5)
    assert found.entropy == pytest.approx((0.4, 0.25))
    assert found.sampled[-1] == (7, 0.7)
    assert (found.steps_success, found.steps_failure) == (1.0, None)


def test_a_run_that_was_not_evaluated_before_begins_where_the_others_do(tmp_path: Path):
    found = learning.read_result("imitation", 0, a_run(tmp_path / "run", evaluated_before=False), 0.35, 60.0)
    assert (found.before, found.gain) == (0.35, None)


def test_figures_of_earlier_calls_are_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found: list[Any] = [asdict(learning.read_result("rewards", 0, a_run(tmp_path / "run"), None, 60.0))]
    (tmp_path / "old.json").write_text(json.dumps({"runs": found}))
    words = ["--arms", "--add", str(tmp_path / "old.json"), "--json", str(tmp_path / "new.json")]
    learning.main([*words, "--plots", str(tmp_path / "plot.svg")])
    assert "70%" in capsys.readouterr().out
    assert json.loads((tmp_path / "new.json").read_text())["runs"][0]["after"] == 0.7
    drawn = xml.etree.ElementTree.parse(tmp_path / "plot.svg")
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "rewards, greedy after: 70%" in texts


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(SystemExit, match=r"bench.learning: .*absent.json"):
        learning.main(["--arms", "--add", str(tmp_path / "absent.json")])


@pytest.mark.parametrize("arm", learning.ARMS)
def test_an_arm_is_a_configuration_that_holds(arm: str, tmp_path: Path):
    overrides = [*learning.EVALUATION, *learning.ARMS[arm], f"run.directory={tmp_path}"]
    config = load_config(learning.CONFIG, overrides)
    assert config.run.directory == str(tmp_path)
