"""Labels of people: the forms of their files, and agreement, precision and recall of each judge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.labels import judge_scores, read_labels
from megatron_webrl.ring.record import RecordFileWriter, encode_trajectory
from megatron_webrl.track.evaluations import wilson_interval
from megatron_webrl.types import RubricFact
from tests.judge.support import episode
from tools.judge_endpoint.process import endpoint_process

AGENTS = [
    {"task_id": "a", "confirmed_task": "Find it.", "Operator_human_label": "1", "SeeAct_human_label": "0"},
    {"task_id": "b", "confirmed_task": "Buy it.", "Operator_human_label": "2", "SeeAct_human_label": 1},
    {"task_id": "c", "confirmed_task": "Sell it.", "Operator_human_label": "0"},
]
READ = [  # content, agent, labels
    ('{"ticket": 3, "index": 0, "label": "blocked"}\n\n{"ticket": 4, "index": 1, "label": 1, "task_id": "x"}', "",
     {(3, 0): "blocked", (4, 1): "success"}),
    ('{"task_id": "Allrecipes--0", "label": 0}\n{"task_id": "b", "label": "success"}', "",
     {"Allrecipes--0": "failure", "b": "success"}),
    (json.dumps(AGENTS), ":Operator", {"a": "success", "b": "not_executable", "c": "failure"}),
    (json.dumps(AGENTS), ":SeeAct", {"a": "failure", "b": "success"}),
    (json.dumps([{"task_id": "a", "Mine_human_label": 1}]), "", {"a": "success"}),
]  # fmt: skip
REFUSED = [
    ("", "", "has no labels"), ('{"task_id": "a"}', "", "labels:1: expected"), ("[1]", "", "is no list of rows"),
    ('{"ticket": 1, "label": "success"}', "", "labels:1: expected"), ('{"task_id": "a", "label": 3}', "", "labels:1"),
    ('{"task_id": "a", "label": true}', "", "labels:1: expected"), ("no JSON", "", "labels:1: expected"),
    ('{"task_id": "a", "label": 1}\n{"task_id": "a", "label": 0}', "", "a second label for task a"),
    (json.dumps(AGENTS), "", "name one, as in --against=.*labels:AGENT, of Operator, SeeAct"),
    (json.dumps(AGENTS), ":Me", "'Me' is not one of Operator, SeeAct"),
    ('{"task_id": "a", "label": 1}', ":Me", "has no columns of agents"),
    (json.dumps([{"task_id": "a", "A_human_label": "yes"}]), "", "A_human_label 0, 1 or 2"),
    (json.dumps([{"task_id": "a"}]), "", "no column"), ("[{", "", "is no list of rows"),
]  # fmt: skip


def test_labels_are_read_by_episode_by_task_and_by_agent(tmp_path: Path):
    path = tmp_path / "labels"
    for content, agent, expected in READ:
        path.write_text(content)
        assert dict(read_labels(f"{path}{agent}").by_key) == expected


def test_other_labels_are_refused(tmp_path: Path):
    path = tmp_path / "labels"
    for content, agent, message in REFUSED:
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_labels(f"{path}{agent}")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_labels(str(tmp_path / "none"))


def line(ticket: int, outcome: str, task: str = "", votes: str = "", stored: str = "failure") -> dict[str, Any]:
    cast = [{"model": f"m{n}", "outcome": vote} for n, vote in enumerate(votes.split())]
    return {
        "episode": f"e:{ticket}", "ticket": ticket, "index": 0, "task": task or str(ticket), "worker": "w",
        "finished_at": float(ticket), "outcome": outcome, "stored": stored, "votes": cast,
    }  # fmt: skip


def test_agreement_precision_and_recall_are_of_labelled_episodes(tmp_path: Path):
    pairs = {
        ("success", "success"): 5, ("failure", "success"): 2, ("success", "failure"): 1, ("failure", "failure"): 3,
        ("success", "judge_error"): 2, ("not_executable", "success"): 1, ("not_executable", "failure"): 1,
    }  # fmt: skip
    cases = [pair for pair, count in pairs.items() for _ in range(count)]
    lines = [line(n, verdict, stored="success") for n, (_, verdict) in enumerate(cases)]
    path = tmp_path / "labels.jsonl"
    rows = [json.dumps({"ticket": n, "index": 0, "label": label}) for n, (label, _) in enumerate(cases)]
    path.write_text("\n".join([*rows, '{"ticket": 99, "index": 0, "label": "success"}']))
    labels = read_labels(str(path))
    assert labels.without_episode(lines) == 1
    judge, stored = judge_scores(labels, [*lines, line(50, "success")], "mine", [])  # the last one has no label
    assert (judge["judge"], judge["episodes"], stored["judge"]) == ("mine", 15, "stored outcomes")
    for name, hits, count in (("agreement", 8, 11), ("precision", 5, 8), ("recall", 5, 8)):
        assert judge[name] == {
            "share": hits / count,
            "interval": list(wilson_interval(hits / count, count)),
            "of": count,
        }
    assert (stored["agreement"]["of"], stored["precision"]["share"], stored["recall"]["share"]) == (13, 8 / 15, 1.0)
    nothing = judge_scores(labels, [line(9, "judge_error")], "mine", [])[0]
    assert nothing["agreement"] == {"share": None, "interval": None, "of": 0}


def test_every_model_that_votes_is_a_judge_of_its_own(tmp_path: Path):
    path = tmp_path / "labels.jsonl"
    path.write_text('{"task_id": "a", "label": 1}\n{"task_id": "b", "label": 0}')
    lines = [
        line(0, "success", "a", "success success failure"),
        line(1, "judge_error", "b", "failure success judge_error"),
    ]
    found = {each["judge"]: each["agreement"]["share"] for each in judge_scores(read_labels(str(path)), lines, "x", [])}
    assert found == {
        "x": 1.0,
        "x: votes of m0": 1.0,
        "x: votes of m1": 0.5,
        "x: votes of m2": 0.0,
        "stored outcomes": 0.5,
    }


def test_the_command_compares_all_judges_of_the_same_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Labels as Online-Mind2Web releases them; the text oracle knows the facts, and WebVoyager's question has none."""
    facts = (RubricFact("1", "price", "12 euros"),)
    answers = {"a": ("It costs 12 euros.", "1"), "b": ("It costs 3 euros.", "0"), "c": ("Dear", "0")}
    with RecordFileWriter(tmp_path / "stored.records") as file:
        for ticket, (task, (answer, _)) in enumerate(answers.items()):
            made = episode(answer, ticket=ticket, facts=facts, reference=None)
            file.write(encode_trajectory(replace(made, task=replace(made.task, id=task))))
    rows = [{"task_id": task, "Ours_human_label": label} for task, (_, label) in answers.items()]
    (tmp_path / "human_label.json").write_text(json.dumps([*rows, {"task_id": "z", "Ours_human_label": "2"}]))
    common = ["judge", str(tmp_path / "stored.records"), "verdict.name=oracle", "votes=3"]
    with endpoint_process(tmp_path) as url:
        common.append(f"verdict.url={url}")
        assert main([*common, "protocol=webvoyager"]) == 0
        options = ["--against", str(tmp_path / "human_label.json"), "--json", str(tmp_path / "out.json")]
        capsys.readouterr()
        assert main([*common, "protocol=rubric", *options]) == 0
        printed = capsys.readouterr().out
        found = json.loads((tmp_path / "out.json").read_text())
        (tmp_path / "labels.jsonl").write_text('{"task_id": "a", "label": 1}')
        with RecordFileWriter(tmp_path / "twice.records") as file:
            for ticket in range(2):
                made = episode("Dear", ticket=ticket, facts=facts)
                file.write(encode_trajectory(replace(made, task=replace(made.task, id="a"))))
        twice = ["judge", str(tmp_path / "twice.records"), *common[2:], "--against", str(tmp_path / "labels.jsonl")]
        assert main(twice) == 2
    assert "the label of task a could be of 2 episodes" in capsys.readouterr().err
    judges = {each["judge"].partition("-")[0]: each for each in found["judges"]}
    names = [each["judge"] for each in found["judges"]]
    assert [name.split("-")[0] for name in names] == ["rubric", "rubric", "webvoyager", "stored outcomes"]
    assert names[1] == f"{names[0]}: votes of oracle"
    assert (found["judges"][0]["agreement"]["share"], found["judges"][1]["agreement"]["of"]) == (1.0, 9)
    assert [judges["webvoyager"][name]["share"] for name in ("agreement", "precision", "recall")] == [1 / 3, 1 / 3, 1.0]
    assert (found["labels_without_episode"], found["votes_differ"]) == (1, 0.0)
    assert "100.0% (44% to 100%)" in printed
    assert "votes differ on 0.0% of the episodes" in printed
