"""Rows of task files: the task that each becomes, and the message for what does not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.tasks.files.rows import FORMATS, RowError, make_field_map, parse_line, parse_task, parse_website
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.types import RubricFact, Task
from tests.tasks.files.webgym_rows import webgym_row, write_rows

WEBGYM = FORMATS["webgym"]


def test_a_row_becomes_a_task_with_all_of_its_fields() -> None:
    row = webgym_row(
        7, website="https://WWW.Shop.Example.com/start?x=1", difficulty=4, task_name=" Find it. ", task_id=12,
        evaluator_reference=[
            {"id": "a", "description": "The price", "facts": ["It is 3", "It is in dollars"]},
            {"id": 2, "description": "The shop", "facts": ["It is open"]},
        ],
    )  # fmt: skip
    assert parse_task(row, WEBGYM) == Task(
        id="12", source="web", environment="shopping-food", seed=0, max_steps=0, instruction="Find it.",
        difficulty="medium", answer="7 dollars", url="https://WWW.Shop.Example.com/start?x=1",
        website="shop.example.com", benchmark="Bench", domain="Shopping & Food", subdomain="groceries", fact_count=4,
        facts=(
            RubricFact("a", "The price", "It is 3"), RubricFact("a", "The price", "It is in dollars"),
            RubricFact("2", "The shop", "It is open"),
        ),
    )  # fmt: skip


def test_legacy_references_become_facts_whose_number_decides_the_difficulty() -> None:
    for reference, facts in (
        ("One fact", [("1", "", "One fact")]),
        (["First", "Second"], [("1", "", "First"), ("2", "", "Second")]),
        ([{"description": "Whole"}, {"id": "", "description": "More", "facts": None}],
         [("1", "", "Whole"), ("2", "", "More")]),
        ([{"id": 3, "facts": ["Without description"]}], [("3", "", "Without description")]),
    ):  # fmt: skip
        found = parse_task(webgym_row(0, evaluator_reference=reference), WEBGYM).facts
        assert found == tuple(RubricFact(*fact) for fact in facts), reference
    levels = [parse_task(webgym_row(0, difficulty=count), WEBGYM) for count in (0, 1, 3, 4, 6, 7, 40)]
    assert [task.difficulty for task in levels] == ["easy"] * 3 + ["medium"] * 2 + ["hard"] * 2
    assert [task.fact_count for task in levels] == [0, 1, 3, 4, 6, 7, 40]


def test_both_names_of_the_reference_answer_are_read_and_numbers_are_as_python_writes_them() -> None:
    row = webgym_row(0)
    del row["definite_answer"]
    assert parse_task(row, WEBGYM).answer is None
    assert parse_task(row | {"definite_answer": "", "reference_answer": None}, WEBGYM).answer is None
    for text in ("", " ", None, "42 "):
        assert parse_task(row | {"definite_answer": text, "reference_answer": " 42"}, WEBGYM).answer == "42"
    for text, answer in (("12.50", "12.5"), ("42", "42"), ("1e2", "100.0")):
        line = json.dumps(row | {"reference_answer": "NUMBER"}).replace('"NUMBER"', text)
        assert parse_task(parse_line(line.encode()), WEBGYM).answer == answer


def test_lines_that_are_no_objects_of_strict_json_are_refused() -> None:
    for text, found in (
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": [-Infinity]}', "-Infinity is not JSON"),
        ('{"a": 1e400}', "1e400 is beyond the range of a number"),
        ('{"a": 1, "b": 2, "a": 1}', 'the key "a" occurs twice'),
        ('{"a": [{"id": 1, "id": 2}]}', 'the key "id" occurs twice'),
        ('{"task_id": 1 "website": 2}', "at column 15"),
        ("[1, 2]", "[1, 2]"),
        ("[" * 100_000, ""),
        ('{"difficulty": ' + "9" * 5000 + "}", ""),
    ):
        with pytest.raises(RowError, match=rf"^expected a JSON object, found .*{re.escape(found)}"):
            parse_line(text.encode())
    with pytest.raises(RowError, match="expected UTF-8, found byte 0xfc at column 9"):
        parse_line(b'{"a": "F\xfcnd"}')


def test_websites_compare_by_host_without_www() -> None:
    for text, url, website in (
        ("example.com", "https://example.com", "example.com"),
        ("HTTP://Example.com:8080/A?b#c", "HTTP://Example.com:8080/A?b#c", "example.com"),
        ("www.example.co.uk/", "https://www.example.co.uk/", "example.co.uk"),
        ("www.com", "https://www.com", "www.com"),
        ("bücher.de", "https://bücher.de", "xn--bcher-kva.de"),
        ("example.com.", "https://example.com.", "example.com"),
        ("shop-3.localhost/items", "http://shop-3.localhost/items", "shop-3.localhost"),
        ("https://shop-3.localhost", "https://shop-3.localhost", "shop-3.localhost"),
    ):
        assert parse_website(text) == (url, website), text


def test_every_start_lists_the_first_ten_rows_that_do_not_fit_and_refuses_the_file(tmp_path: Path) -> None:
    rows = [webgym_row(n, task_name=17 if n % 2 else "Go") for n in range(30)]
    path = write_rows(tmp_path / "tasks.jsonl", [rows[0], rows[0], *rows[2:]])
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            make_source(tasks_config(source="webgym", train_file=str(path)))
        assert str(caught.value).splitlines() == [
            f"{path}: 15 of 30 rows do not fit; `webrl tasks check` lists more",
            f"{path}:2: field task_id: expected an id of its own, found 'task-0' of line 1 again",
            *(f"{path}:{line}: field task_name: expected text, found 17" for line in range(4, 21, 2)),
            "and 5 more",
        ]


FAULTS: list[tuple[dict[str, Any], str]] = [  # fields of a row, and what the message names: place and value
    *(({"difficulty": value}, f"difficulty: .* 1000, .*, found {json.dumps(value)}")
      for value in (2.5, True, None, 1001, -1, "extreme")),
    ({"evaluator_reference": {"id": 1}}, 'evaluator_reference: .*, found {"id": 1}'),
    ({"evaluator_reference": []}, r"evaluator_reference: .*, found \[\]"),
    ({"evaluator_reference": [{"id": 1, "description": "d", "facts": []}]}, r"evaluator_reference\[0\].facts: .*\[\]"),
    ({"evaluator_reference": [{"id": 1, "description": "d", "facts": ["a", 2]}]}, r"reference\[0\].facts\[1\]: .*2"),
    ({"evaluator_reference": ["a", {"id": [1], "facts": ["b"]}]}, r"evaluator_reference\[1\].id: .*, found \[1\]"),
    ({"evaluator_reference": [{"id": 1}]}, r"evaluator_reference\[0\].description: expected text, found nothing"),
    ({"evaluator_reference": [{"id": 1, "description": "d", "Facts": ["a"]}]}, r'reference\[0\]: .*, found "Facts"'),
    ({"domain": 5}, "domain: expected text, found 5"),
    ({"definite_answer": ["a"]}, r'definite_answer: expected text, found \["a"\]'),
    ({"definite_answer": "41", "reference_answer": "42"}, 'reference_answer: .* definite_answer, "41", found "42"'),
    ({"task_id": None}, "task_id: expected text, found null"),
    ({"task_name": "\ud800"}, "task_name: .*surrogate pair at character 1"),
    ({"task_name": 17}, "task_name: expected text, found 17"),
    ({"task_name": " "}, 'task_name: .* not empty, found " "'),
    *(({"website": text}, f"website: .*found {re.escape(json.dumps(text)[:50])}") for text in (
        "Amazon", "ftp://example.com", "https://", "https://a@example.com", "two words.com", "example.com/a b",
        "example..com", "example.com:0", "example.com:70000", "javascript:alert(1)", "//example.com", "[::1]",
        "example.com/\\x", "-.com" * 60, "a.com, b.com",
    )),
]  # fmt: skip


def test_a_field_that_does_not_fit_is_named_with_its_value() -> None:
    for fields, message in FAULTS:
        with pytest.raises(RowError, match=f"^field .*{message}"):
            parse_task(webgym_row(0, **fields), WEBGYM)
    missing = webgym_row(3)
    del missing["task_name"]
    with pytest.raises(RowError, match="field task_name: expected text, found nothing"):
        parse_task(missing, WEBGYM)


def test_benchmarks_of_the_shipped_formats_are_read() -> None:
    mind2web = {
        "task_id": "b7258", "confirmed_task": "Find a flight", "website": "https://www.united.com/",
        "reference_length": 9, "level": "medium",
    }  # fmt: skip
    task = parse_task(mind2web, FORMATS["online_mind2web"])
    assert (task.difficulty, task.fact_count, task.benchmark) == ("medium", 0, "Online-Mind2Web")
    assert (task.id, task.website, task.environment, task.facts) == ("b7258", "united.com", "page", ())
    voyager = {
        "web_name": "Google Map", "id": "Google Map--3", "ques": "Find a park", "web": "https://maps.google.com/",
    }  # fmt: skip
    task = parse_task(voyager, FORMATS["webvoyager"])
    assert (task.difficulty, task.benchmark, task.environment) == ("medium", "WebVoyager", "google-map")


def test_fields_of_a_file_of_ones_own_are_mapped() -> None:
    fields = make_field_map("file", {"id": "key", "instruction": "goal", "website": "start", "facts": "must"})
    task = parse_task({"key": 3, "goal": "Buy a lamp", "start": "lamps.example", "must": ["a", "b", "c", "d"]}, fields)
    assert (task.id, task.instruction, task.website) == ("3", "Buy a lamp", "lamps.example")
    assert (task.difficulty, task.fact_count, len(task.facts)) == ("medium", 4, 4)
    mapped = make_field_map("webgym", {"instruction": "goal"})
    assert parse_task(webgym_row(0, goal="Another"), mapped).instruction == "Another"
    assert mapped.digest != WEBGYM.digest
    named = make_field_map("webgym", {"answer": "gold"})
    assert parse_task(webgym_row(0, gold=None), named).answer is None
    with pytest.raises(RowError, match=r"^field gold: expected a value or null, because tasks.fields names it"):
        parse_task(webgym_row(0), named)


def test_an_impossible_field_map_is_refused() -> None:
    for source, fields, message in (
        ("file", {"id": "key"}, r"fields instruction, website .*tasks\.fields="),
        ("webgym", {"instructions": "goal"}, r"tasks\.fields: 'instructions' .*; near: instruction"),
        ("webgym", {"id": ""}, r"tasks\.fields\.id is empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_field_map(source, fields)
