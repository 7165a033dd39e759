"""The index of a task file: its content, when it is written again, and several processes at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tasks.files import index, indexing
from megatron_webrl.tasks.files.conversion import TaskFile
from megatron_webrl.tasks.files.index import TaskIndex
from megatron_webrl.tasks.files.indexing import open_index
from megatron_webrl.tasks.files.rows import FORMATS, make_field_map
from megatron_webrl.tasks.sampler.units import task_key
from megatron_webrl.types import DIFFICULTIES
from tests.tasks.files.webgym_rows import webgym_row, write_rows

WEBGYM = FORMATS["webgym"]


@pytest.fixture
def file(tmp_path: Path, folders: None) -> TaskFile:
    rows = [webgym_row(number, website=f"www.site{number % 7}.com") for number in range(50)]
    return TaskFile("tasks.jsonl", write_rows(tmp_path / "data" / "tasks.jsonl", rows))


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the name of every file that is indexed."""
    names: list[str] = []
    build = indexing._build

    def counted(file: TaskFile, *rest: object) -> TaskIndex:
        names.append(file.name)
        return build(file, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(indexing, "_build", counted)
    return names


def test_an_index_tells_where_rows_are_and_what_samplers_need(file: TaskFile) -> None:
    index = open_index(file, WEBGYM)
    data = file.path.read_bytes()
    for row in range(50):
        start, length = int(index.offsets[row]), int(index.lengths[row])
        assert json.loads(data[start : start + length])["task_id"] == f"task-{row}"
        assert index.websites[index.website_ids[row]] == f"site{row % 7}.com"
    assert index.task_keys.tolist() == [task_key(f"task-{row}") for row in range(50)]
    assert [DIFFICULTIES[level] for level in index.levels[:7]] == ["easy"] * 3 + ["medium"] * 3 + ["hard"]
    assert index.lines.tolist() == list(range(1, 51))
    assert (index.domains, index.public_website) == (("shopping-food",), "site0.com")
    assert sorted(index.websites) == sorted(f"site{number}.com" for number in range(7))
    assert [index.websites.index(name) for name in index.websites] == list(range(7))
    assert "site6.com" in index.websites
    assert "site7.com" not in index.websites
    with pytest.raises(ValueError, match=r"'site7\.com' is not among the websites"):
        index.websites.index("site7.com")
    assert all(isinstance(array, np.memmap) for array in (index.offsets, index.levels, index.task_keys))


def test_the_digest_of_an_index_is_that_of_the_rows_and_their_fields(file: TaskFile, tmp_path: Path) -> None:
    digest = open_index(file, WEBGYM).digest
    assert open_index(file, make_field_map("webgym", {"subdomain": "domain"})).digest != digest
    data = file.path.read_bytes()
    path = tmp_path / "data" / "copy.jsonl"
    path.write_bytes(data.replace(b"\n", b"\n\n"))
    assert open_index(TaskFile("copy.jsonl", path), WEBGYM).digest == digest
    path.write_bytes(data.replace(b"item 25", b"item 52"))
    assert open_index(TaskFile("copy.jsonl", path), WEBGYM).digest != digest


def test_a_file_is_indexed_once_for_each_field_map(file: TaskFile, builds: list[str]) -> None:
    first = open_index(file, WEBGYM)
    again = open_index(file, WEBGYM)
    assert builds == ["tasks.jsonl"]
    assert first.task_keys.tolist() == again.task_keys.tolist()
    open_index(file, make_field_map("webgym", {"id": "task_name"}))
    assert builds == ["tasks.jsonl"] * 2
    assert len(list(file.path.parent.iterdir())) == 3  # the file, and two indices


def test_a_changed_file_is_indexed_again(file: TaskFile, builds: list[str]) -> None:
    open_index(file, WEBGYM)
    status, content = file.path.stat(), file.path.read_bytes()
    file.path.write_bytes(content.replace(b"task-49", b"task-99"))  # of equal length, and the time is set back
    os.utime(file.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_index(file, WEBGYM).task_keys[49] == task_key("task-99")
    file.path.touch()
    open_index(file, WEBGYM)
    write_rows(file.path, [webgym_row(3)])
    assert len(open_index(file, WEBGYM)) == 1
    assert len(builds) == 4


@pytest.mark.parametrize("damage", ["", "WEBRLIDX", "cut", "header", "version"])
def test_a_damaged_or_outdated_index_is_written_again(file: TaskFile, damage: str, builds: list[str]) -> None:
    open_index(file, WEBGYM)
    [path] = file.path.parent.glob("*.index")
    content = path.read_bytes()
    cases = {
        "cut": content[:-64],
        "header": content[:40],
        "version": content.replace(b'"version": ', b'"version": 9', 1),
    }
    path.write_bytes(cases.get(damage, damage.encode()))
    assert len(open_index(file, WEBGYM)) == 50
    assert len(builds) == 2
    assert path.read_bytes() == content


def test_an_index_goes_to_the_cache_folder_where_the_data_are_read_only(
    file: TaskFile, builds: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != file.path.parent and access(path, mode))
    open_index(file, WEBGYM)
    open_index(file, WEBGYM)
    assert builds == ["tasks.jsonl"]
    assert [path.name for path in file.path.parent.iterdir()] == ["tasks.jsonl"]
    [path] = (tmp_path / "cache" / "megatron_webrl" / "tasks").iterdir()
    assert path.name.endswith(f"-tasks.jsonl.{WEBGYM.digest}.index")


def test_no_folder_for_an_index_is_an_error_that_names_the_way_out(
    file: TaskFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != file.path.parent and access(path, mode))
    with pytest.raises(ConfigError, match=r"cannot be made: .*; set XDG_CACHE_HOME to a writable folder"):
        open_index(file, WEBGYM)


CONTENDER = """
import logging, sys
from pathlib import Path
from megatron_webrl.tasks.files.conversion import TaskFile
from megatron_webrl.tasks.files.rows import FORMATS
from megatron_webrl.tasks.files.indexing import open_index
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
sys.stdin.readline()
print(len(open_index(TaskFile("tasks.jsonl", Path(sys.argv[1])), FORMATS["webgym"])))
"""


def test_of_several_processes_one_writes_the_index(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "tasks.jsonl", (webgym_row(number) for number in range(4000)))
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for contender in contenders:
        assert contender.stdin is not None
        contender.stdin.write("\n")
        contender.stdin.flush()
    found = [contender.communicate(timeout=60)[0].splitlines() for contender in contenders]
    assert [lines[-1] for lines in found] == ["4000"] * 4
    assert sum(line.startswith("indexed ") for lines in found for line in lines) == 1
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith("tasks")) == [
        "tasks.jsonl",
        f"tasks.jsonl.{WEBGYM.digest}.index",
    ]


def test_a_process_killed_while_it_writes_leaves_nothing_in_the_way(file: TaskFile, builds: list[str]) -> None:
    target = file.path.with_name(f"tasks.jsonl.{WEBGYM.digest}.index")
    target.with_name(f"{target.name}.lock").touch()  # its lock is released, its file stays
    target.with_name(f".{target.name}.elsewhere.1").write_bytes(b"half")
    assert len(open_index(file, WEBGYM)) == 50
    assert not target.with_name(f"{target.name}.lock").exists()


def test_files_that_are_empty_missing_or_growing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: TaskFile
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match=r"^empty\.jsonl holds no tasks$"):
        open_index(TaskFile("empty.jsonl", empty), WEBGYM)
    with pytest.raises(ConfigError, match=r"^gone\.jsonl: No such file or directory \(.*gone\.jsonl\)$"):
        open_index(TaskFile("gone.jsonl", tmp_path / "gone.jsonl"), WEBGYM)
    scan = indexing.scan

    def scan_while_it_grows(*arguments: object) -> object:
        yield from scan(*arguments)  # type: ignore[arg-type]
        with file.path.open("a") as more:
            more.write(json.dumps(webgym_row(60)) + "\n")

    monkeypatch.setattr(indexing, "scan", scan_while_it_grows)
    with pytest.raises(ConfigError, match=r"^tasks\.jsonl changed while it was read"):
        open_index(file, WEBGYM)


def test_tasks_of_very_many_domains_have_one_environment(tmp_path: Path) -> None:
    rows = [webgym_row(number, domain=f"domain {number}") for number in range(indexing.MAX_DOMAINS + 1)]
    assert open_index(TaskFile("a", write_rows(tmp_path / "many.jsonl", rows)), WEBGYM).domains == ()
    index = open_index(TaskFile("b", write_rows(tmp_path / "fewer.jsonl", rows[1:])), WEBGYM)
    assert len(index.domains) == indexing.MAX_DOMAINS


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert index.cache_folder() == Path("/somewhere/megatron_webrl/tasks")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert index.cache_folder() == Path.home() / ".cache" / "megatron_webrl" / "tasks"
