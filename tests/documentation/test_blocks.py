"""Every code block says whether a test runs it. One that is not run is checked: commands fit their parsers, Python
compiles, settings load."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from megatron_webrl import cli
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.command import load_judge_config
from tests.documented_blocks import FENCE, PAGES, ROOT, Block, blocks_of

CLUSTER_PAGES = ("docs/checking.md", "docs/slurm.md")
ASSIGNMENT = re.compile(r"[A-Z_]+=")
SETTING = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+=")
OPERATORS = {"&&", "||", "|", ";", "&"}
OURS = re.compile(r"(?:CONFIG=)?((?:configs|launch|tools|tests)/[\w./-]+)")  # a file that a command names
OTHERS = {
    "apptainer", "docker", "export", "grep", "ldd", "mlflow", "pip", "playwright", "pytest", "source", "uv", "vllm",
}  # fmt: skip
"""Programs that are not ours."""
OTHER_MODULES = {"venv", "vllm.entrypoints.openai.api_server"}


class Misfit(Exception):
    """A command that does not fit; the message says why."""


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    place: str
    words: tuple[str, ...]  # without assignments of variables before the program
    text: str
    whole: bool  # else it is only named, such as `webrl placement --memory`

    @property
    def program(self) -> str:
        return Path(self.words[0]).name


def commands_in(place: str, text: str, whole: bool) -> Iterator[Command]:
    """The commands of shell code, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in OPERATORS:
                words.append(word)
                continue
            while words and ASSIGNMENT.match(words[0]):
                words.pop(0)
            if words:
                yield Command(place, tuple(words), line.strip(), whole)
            words = []


def commands_of(page: str) -> Iterator[Command]:
    """The commands of a page that no test runs: of its blocks, and those that its text names (`webrl status`)."""
    for block in blocks_of(page):
        if (block.language, block.mark) == ("bash", "checked"):
            yield from commands_in(str(block), block.text, whole=True)
    if page == "docs/commands.md":
        return  # generated from the parsers, with forms of commands
    for span in re.findall(r"`([^`]+)`", FENCE.sub("", (ROOT / page).read_text())):
        words = span.split()
        ours = words[0] in ("webrl", "make", "sbatch") or words[:2] == ["python", "-m"]
        if ours and len(words) > 1 and "..." not in span:
            yield from commands_in(page, " ".join(words), whole=False)


@cache
def parser_of(target: str) -> argparse.ArgumentParser:
    """The parser that a module `a.b` or a script `a/b.py` gives its arguments to."""
    found: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        found.append(parser)
        raise KeyboardInterrupt

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", [target]),
        contextlib.suppress(KeyboardInterrupt),
    ):
        if target.endswith(".py"):
            runpy.run_path(str(ROOT / target), run_name="__main__")
        else:
            runpy.run_module(target, run_name="__main__")
    return found[0]


def check_arguments(parser: argparse.ArgumentParser, command: Command, arguments: Sequence[str]) -> None:
    """Parse the arguments; of a command that is only named, check that its subcommands and options exist."""
    if command.whole:
        try:
            cli._parse(arguments) if command.program == "webrl" else parser.parse_args(arguments)
        except SystemExit:
            raise Misfit("refused by its parser") from None
        return
    for word in arguments:
        groups = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        if word.startswith("--") and word not in parser._option_string_actions:
            raise Misfit(f"no option {word}")
        if groups and not word.startswith("--"):
            if word not in groups[0].choices:
                raise Misfit(f"no command {word}")
            parser = groups[0].choices[word]


def check_python(command: Command) -> None:
    target, *arguments = command.words[1:]
    if target == "-c":
        compile(arguments[0], command.place, "exec")
        return
    if target == "-m":
        target, *arguments = arguments
    if target.startswith("tools"):
        check_arguments(parser_of(target), command, arguments)
    elif target not in OTHER_MODULES and importlib.util.find_spec(target) is None:
        raise Misfit(f"no module {target}")


def check(command: Command) -> None:
    """Raises Misfit or ConfigError."""
    if settings := [word for word in command.words if SETTING.match(word) and "..." not in word]:
        parse_config(None, settings)
    for path in OURS.findall(" ".join(command.words)):
        if not (ROOT / path).exists():
            raise Misfit(f"no file {path}")
    program = command.program
    if program == "webrl":
        check_arguments(cli._parser(), command, command.words[1:])
    elif program.startswith("python"):
        check_python(command)
    elif program in ("sbatch", "bash"):  # options of their own, a script of the repository, its arguments
        rest = [word for word in command.words[1:] if not word.startswith("-")]
        if command.whole and not (rest and (ROOT / rest[0]).is_file()):
            raise Misfit("names no script of the repository")
    elif program == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        if missing := [word for word in command.words[1:] if "=" not in word and word not in targets]:
            raise Misfit(f"no target {missing[0]}")
    elif program not in OTHERS and not program.endswith(".sh"):  # a script is a file that exists
        raise Misfit(f"unknown program {program}")


def test_every_command_of_a_page_fits() -> None:
    commands, wrong = [command for page in PAGES for command in commands_of(page)], []
    for command in commands:
        try:
            check(command)
        except (Misfit, ConfigError) as error:
            wrong.append(f"{command.place}: {command.text}: {error}")
    assert not wrong
    programs = [command.program for command in commands]
    for program, least in (("webrl", 60), ("sbatch", 8), ("python", 40), ("make", 15)):
        assert programs.count(program) > least


@pytest.mark.parametrize("page", CLUSTER_PAGES)
def test_the_placements_of_the_pages_are_possible(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for command in commands_of(page):
        if command.whole and command.text.startswith("webrl placement configs/"):
            assert cli.main(command.words[1:]) == 0, command
            assert (tmp_path / "placement.json").exists() == ("--json" in command.words)
            (tmp_path / "placement.json").unlink(missing_ok=True)


# -- other blocks ----------------------------------------------------------------------------------

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
MARKS = {
    "bash": {"checked"}, "python": {"checked"}, "yaml": {"checked"}, "json": {"checked"}, "text": {"output", "sketch"},
}  # fmt: skip


def checked(language: str) -> list[Block]:
    return [block for block in BLOCKS if (block.language, block.mark) == (language, "checked")]


def test_every_block_says_whether_a_test_runs_it() -> None:
    silent = [
        f"{block}: ```{block.language} {block.mark}"
        for block in BLOCKS
        if block.mark not in MARKS.get(block.language, ()) and not block.mark.startswith("run=")
    ]
    assert not silent, "see CONTRIBUTING.md, Code blocks"


def test_a_test_that_is_named_takes_its_blocks_from_the_page() -> None:
    run = {(block.mark.removeprefix("run="), block.page) for block in BLOCKS if block.mark.startswith("run=")}
    assert len(run) > 4
    for test, page in run:
        source = (ROOT / test).read_text()
        assert "blocks_run_by(__file__, " in source, test
        assert page in source, test


def test_what_is_not_run_is_valid_python_settings_or_json(tmp_path: Path) -> None:
    for block in checked("python"):
        compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for block in checked("json"):
        assert [json.loads(line) for line in block.text.splitlines()], block
    for block in checked("yaml"):
        documents = list(yaml.safe_load_all(block.text))
        assert all(documents), block
        for document in documents:
            (file := tmp_path / "documented.yaml").write_text(yaml.safe_dump(document))
            if block.page == "docs/judge.md":  # a section judge
                load_judge_config(file, [])
            else:
                parse_config(file)
