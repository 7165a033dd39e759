"""The examples of docs/tasks.md for task files and for a source of one's own, run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl import cli
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.tasks.registry import make_source
from tests.documented_blocks import blocks_run_by, command_environment

ROOT = Path(__file__).parents[2]
PAGE = "docs/tasks.md"


def blocks(heading: str, language: str) -> list[str]:
    return blocks_run_by(__file__, PAGE, language, heading)


def run_block(block: str) -> str:
    """Run documented commands, which must succeed, in a shell in the working folder; returns what they print."""
    commands = block.replace("PYTHONPATH=.", f"PYTHONPATH=.{os.pathsep}{ROOT}")
    if os.getuid() == 0:
        commands = commands.replace("browser.open_web=true", "browser.open_web=true browser.user=nobody")
    command = ["bash", "-euc", commands]
    done = subprocess.run(command, env=command_environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the project's configurations, from which packages can be imported."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_package")]:
        del sys.modules[name]


def test_the_example_of_task_files_is_checked_and_can_be_trained_on(folder: Path) -> None:
    (code,) = blocks("Task files", "python")
    exec(compile(code, PAGE, "exec"), {"__name__": "documented"})  # the page is ours
    (configuration,) = blocks("Task files", "yaml")
    user = ", user: nobody" if os.getuid() == 0 else ""
    (folder / "towns.yaml").write_text(configuration.replace("open_web: true", f"open_web: true{user}"))
    (commands,) = blocks("Task files", "bash")
    lines = run_block(commands).splitlines()
    assert "train.jsonl: 6 tasks on 3 websites, 6 facts, 0 with a reference answer" in lines
    assert lines.index("websites in both files: 0") < lines.index("  source: webgym")  # of --check
    source = make_source(parse_config(folder / "towns.yaml", []).tasks)
    assert len({source.training_task(0, ticket).website for ticket in range(6)}) == 3
    assert [source.held_out_task(index).max_steps for index in range(source.evaluation_tasks(0))] == [30, 30]
    source.close()


def test_the_example_of_an_own_source_makes_tasks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("A source of your own", "python")
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "my_source.py").write_text(code)
    (commands,) = blocks("A source of your own", "bash")
    assert "  source: my_package.my_source:Source" in run_block(commands).splitlines()
    command = shlex.split(commands.splitlines()[-1].replace("browser.open_web=true ", ""))
    assert cli.main(command[1:]) == 2
    assert "has tasks on en.wikipedia.org, but browser.open_web=false" in capsys.readouterr().err
    source = make_source(tasks_config(source="my_package.my_source:Source", max_steps=9))
    training = [source.training_task(1, ticket) for ticket in range(50)]
    towns = {str(task.url).rpartition("/")[2] for task in training}
    held_out = {str(source.held_out_task(index).url).rpartition("/")[2] for index in range(10)}
    assert (towns, held_out) == ({"Oslo", "Lima", "Accra"}, {"Quito", "Hanoi"})
    assert training[0].max_steps == 9
    source.close()
