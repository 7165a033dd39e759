"""`webrl judge` on stored episodes, with the endpoint as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_webrl.cli import main
from megatron_webrl.config.judge import JudgeModelConfig, judge_config
from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge import budget
from megatron_webrl.judge.command import load_judge_config
from megatron_webrl.ring.record import RecordFileWriter, encode_trajectory
from megatron_webrl.types import RubricFact, Trajectory
from tests.judge.support import episode
from tests.waiting import until
from tools.judge_endpoint.process import ROOT, endpoint_process, stats_of

FACTS = (RubricFact("1", "price", "12 euros"),)
RIGHT, WRONG = "It costs 12 euros.", "It costs 3 euros."


def write(path: Path, trajectories: list[Trajectory]) -> Path:
    with RecordFileWriter(path) as file:
        for each in trajectories:
            file.write(encode_trajectory(each))
    return path


def stored(ticket: int, answer: str | None, outcome: str, end_reason: str | None = None) -> Trajectory:
    made = episode(answer, ticket=ticket, facts=FACTS, reference=None, instruction=f"Task {ticket}")
    return replace(made, outcome=outcome, reward=float(outcome == "success"), end_reason=end_reason or made.end_reason)


def episodes() -> list[Trajectory]:
    """Six with a regular end: two that the judge agrees on, a false success, a false failure, a mask, no answer."""
    return [
        stored(0, RIGHT, "success"), stored(1, WRONG, "failure"), stored(2, WRONG, "success"),
        stored(3, RIGHT, "failure"), stored(4, RIGHT, "judge_error"), stored(5, None, "failure"),
        stored(6, None, "browser_error", "browser_error"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with endpoint_process(tmp_path_factory.mktemp("endpoint")) as address:
        yield address


def config_file(folder: Path, url: str, **chosen: Any) -> Path:
    path = folder / "judge.yaml"
    path.write_text(yaml.safe_dump({"verdict": {"name": "oracle", "url": url, "input_price": 1.0}, **chosen}))
    return path


def judge(*arguments: object) -> int:
    return main(["judge", *map(str, arguments)])


def test_a_run_is_judged_against_outcomes_and_labels(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    write(run / "records" / "version-000000.records", episodes()[:4])
    write(run / "records" / "version-000001.records", episodes()[4:])
    save_config(Config(judge=judge_config(verdict=JudgeModelConfig("oracle", url))), run / "config.yaml")
    labels = ["success", "failure", "failure", "success", "success", "failure", "failure"]
    lines = [json.dumps({"ticket": n, "index": 0, "label": label}) for n, label in enumerate(labels)]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    options = ["verdict.input_price=1.0", "--against", tmp_path / "labels.jsonl", "--json", tmp_path / "out.json"]
    assert judge(run, *options) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["episodes"], found["not_judged"]) == (6, {"browser_error": 1})
    assert found["outcomes"] == {"success": 3, "failure": 3}
    assert found["stored"] == {
        "episodes": 6, "masked": 0, "accuracy": 3 / 5, "false_success_rate": 2 / 4, "false_failure_rate": 1 / 2,
        "confusion": {
            "failure": {"failure": 2, "success": 1}, "judge_error": {"success": 1},
            "success": {"failure": 1, "success": 1},
        },
    }  # fmt: skip
    assert (found["labels"]["accuracy"], found["labels"]["episodes"]) == (1.0, 6)
    assert (found["labels"]["false_success_rate"], found["labels_without_episode"]) == (0.0, 1)
    assert found["cost"]["dollars"] == pytest.approx(found["cost"]["prompt_tokens"] / 1e6)
    assert found["cost_per_episode"]["calls"] == found["cost"]["calls"] / 6 == 26 / 6
    printed = capsys.readouterr().out
    assert "agreement 60.0% of episodes decided by both, false success 50.0%" in printed
    assert "accuracy 100.0%" in printed
    (kept,) = (run / "judged").iterdir()
    assert len(kept.read_text().splitlines()) == 6


def test_a_second_run_continues_and_each_setting_has_its_file(tmp_path: Path, url: str):
    records = write(tmp_path / "some.records", episodes())
    config = config_file(tmp_path, url)
    assert judge(records, "--config", config, "--limit", 2) == 0
    requests = stats_of(url)["requests"]
    (kept,) = (each for each in (tmp_path / "judged").iterdir() if each.suffix == ".jsonl")
    assert len(kept.read_text().splitlines()) == 2
    with kept.open("a") as file:
        file.write('{"episode": "some.records:2", "cut off')
    assert judge(records, "--config", config, "--json", tmp_path / "out.json") == 0
    first = [json.loads(line)["episode"] for line in kept.read_text().splitlines()]
    assert sorted(first) == [f"some.records:{n}" for n in range(6)]
    between = stats_of(url)["requests"]
    assert between > requests
    assert judge(records, "--config", config, "--json", tmp_path / "again.json") == 0
    assert stats_of(url)["requests"] == between
    assert (tmp_path / "again.json").read_text() == (tmp_path / "out.json").read_text()
    assert judge(records, "--config", config, "judge.protocol=webvoyager") == 0
    names = {path.name.split("-")[0] for path in (tmp_path / "judged").iterdir()}
    assert names == {"rubric", "webvoyager"}
    assert judge(records, "protocol=webvoyager", "--config", config, "--out", kept) == 2
    write(records, episodes()[1::-1])  # other episodes at the same places
    assert judge(records, "--config", config) == 0
    latest = {line["episode"]: line["ticket"] for line in map(json.loads, kept.read_text().splitlines())}
    assert [latest[f"some.records:{n}"] for n in range(3)] == [1, 0, 2]
    write(records, [replace(each, finished_at=each.finished_at + 1) for each in episodes()[1::-1]])  # of a second run
    requests = stats_of(url)["requests"]
    assert judge(records, "--config", config) == 0
    assert stats_of(url)["requests"] > requests


def test_episodes_without_a_usable_reply_are_asked_again_by_the_next_run(tmp_path: Path, url: str):
    records = write(tmp_path / "some.records", episodes()[:2])
    with endpoint_process(tmp_path, "--faults", "truncated=1") as broken:
        assert judge(records, "--config", config_file(tmp_path, broken, attempts=1), "--json", tmp_path / "a.json") == 0
        assert stats_of(broken)["faults"] == {"truncated": 2}
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["outcomes"], found["faults"]) == ({"judge_error": 2}, {"truncated": 2})
    assert found["judge_errors"] == {"blocked: truncated": 2}
    config = config_file(tmp_path, url, attempts=1)
    assert judge(records, "--config", config, "--json", tmp_path / "b.json") == 0
    assert json.loads((tmp_path / "b.json").read_text())["outcomes"] == {"success": 1, "failure": 1}


def test_a_spent_budget_stops_in_good_order_and_is_that_of_all_commands_of_the_hour(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(budget, "HOUR_SECONDS", 10**12)  # no hour ends during the test
    records = write(tmp_path / "some.records", episodes())
    config = config_file(tmp_path, url, concurrency=1)
    before = stats_of(url)["requests"]
    for _ in range(2):
        assert judge(records, "--config", config, "budget.calls_per_hour=12", "--json", tmp_path / "a.json") == 1
        assert "judge.budget.calls_per_hour" in " ".join(capsys.readouterr().out.split())
        assert json.loads((tmp_path / "a.json").read_text())["episodes"] == 2
    assert stats_of(url)["requests"] - before <= 12
    assert judge(records, "--config", config, "--json", tmp_path / "b.json") == 0
    assert json.loads((tmp_path / "b.json").read_text())["episodes"] == 6


def test_ctrl_c_loses_no_verdict(tmp_path: Path):
    records = write(tmp_path / "some.records", [stored(n, RIGHT, "success") for n in range(40)])
    with endpoint_process(tmp_path, "--latency", "0.05") as slow:
        config = config_file(tmp_path, slow, concurrency=2)
        out = tmp_path / "verdicts.jsonl"
        code = "import sys; from megatron_webrl.cli import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "judge", str(records), "--config", str(config), "--out", str(out)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            until(lambda: out.exists() and out.read_text().count("\n") >= 3, "three verdicts")
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "run it again to continue" in " ".join(printed.split())
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert 3 <= len(lines) < 40
        assert {line["outcome"] for line in lines} == {"success"}


def test_an_answer_in_a_record_without_an_end_is_the_end_of_its_episode(tmp_path: Path):
    """As in demonstrations."""
    answered = replace(episode("12 euros", reference="12 euros"), end_reason="")
    records = write(tmp_path / "some.records", [answered, replace(answered, outcome="browser_error")])
    assert judge(records, "evaluators=[page]", "--json", tmp_path / "out.json") == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["outcomes"], found["not_judged"]) == ({"success": 1}, {"browser_error": 1})


def test_what_cannot_be_judged_or_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "damaged.records").write_bytes(b"no records")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    for arguments, message in (
        ([tmp_path / "none"], "is no record file, folder of record files, or run"),
        ([tmp_path / "run"], "set tracking.keep_records=true"),
        ([tmp_path / "damaged.records", "verdict.name=a", "verdict.url=http://x/v1"], "has no trailer"),
        ([tmp_path / "damaged.records", "--limit", "0"], "--limit=0"),
        ([tmp_path / "damaged.records", "--config", tmp_path / "none.yaml"], "cannot be read"),
        ([tmp_path / "damaged.records", "protocol=mine"], "judge.protocol='mine' is not one of rubric"),
        ([tmp_path / "damaged.records", "protocols=mine"], "protocols"),
        ([tmp_path / "damaged.records", "protocol"], "is not of the form key=value"),
    ):
        assert judge(*arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    records = write(tmp_path / "some.records", episodes())
    for labels, message in (
        ("", "has no labels"), ('{"ticket": 1, "label": "success"}', "labels.jsonl:1: "),
        ('{"ticket": "1", "index": 0, "label": "success"}', "labels.jsonl:1: "),
        ('\n{"ticket": 1, "index": 0, "label": ""}', "labels.jsonl:2: "),
        ('{"ticket": 1, "index": 0, "label": "a"}\n{"ticket": 1, "index": 0, "label": "b"}', "a second label"),
    ):  # fmt: skip
        (tmp_path / "labels.jsonl").write_text(labels)
        assert judge(records, "--against", tmp_path / "labels.jsonl") == 2
        assert message in capsys.readouterr().err


def test_a_section_and_a_whole_configuration_are_read_alike(tmp_path: Path):
    section, path = {"protocol": "webjudge", "verdict": {"name": "m"}}, tmp_path / "judge.yaml"
    for content in (section, {"judge": section, "tasks": {"source": "sites"}}):
        path.write_text(yaml.safe_dump(content))
        found = load_judge_config(path, ["judge.attempts=5", "concurrency=3"])
        assert (found.protocol, found.verdict.name, found.attempts, found.concurrency) == ("webjudge", "m", 5, 3)
        assert found.evaluators == ["judge"]
    path.write_text("- a")
    with pytest.raises(ConfigError, match="does not hold a mapping"):
        load_judge_config(path, [])
    # Only the default evaluators of a run are replaced by the judge.
    for evaluators, expected in ((["page"], ["judge"]), (["page", "judge"], ["page", "judge"])):
        save_config(Config(judge=judge_config(evaluators=evaluators)), path)
        assert load_judge_config(path, [], of_run=True).evaluators == expected
        assert load_judge_config(path, []).evaluators == evaluators
        assert load_judge_config(path, ["evaluators=[page]"], of_run=True).evaluators == ["page"]
