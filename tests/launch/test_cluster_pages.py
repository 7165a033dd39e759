"""The commands of docs/gpu.md and docs/slurm.md fit parsers, scripts and configurations, and say whether they ran."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_webrl import cli
from tests.documented_commands import ROOT, command_environment

PAGES = ("docs/gpu.md", "docs/slurm.md")
FENCE = re.compile(r"^ *```\n(.*?)^ *```\n", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Z_]+=")
PROGRAMS = {"webrl", "sbatch", "bash", "python", "make", "docker", "apptainer", "hf", "source", "export"}
OURS = re.compile(r"(?:CONFIG=)?((?:configs|launch|tools)/[\w./-]+)")  # a file that a command names
STATES = re.compile(r"run\s+by\s|not\s+(?:be\s+)?run")


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    page: str
    words: tuple[str, ...]  # without assignments of variables before the program
    text: str

    @property
    def program(self) -> str:
        return Path(self.words[0]).name if self.words else ""


def command(page: str, line: str) -> Command | None:
    """The command of a line; None for text and for output."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return None
    while words and ASSIGNMENT.match(words[0]):
        words.pop(0)
    found = Command(page, tuple(words), line.strip())
    known = found.program in PROGRAMS or found.program.startswith("python3") or found.program.endswith(".sh")
    return found if known and not line.startswith("job: ") else None


def blocks(page: str) -> Iterator[tuple[list[Command], str]]:
    """The commands of each block of code that has some, and the block with the paragraphs around it."""
    text = (ROOT / page).read_text()
    for block in FENCE.finditer(text):
        commands = [each for line in block[1].splitlines() if (each := command(page, line))]
        before, after = text[: block.start()].rstrip(), text[block.end() :].lstrip()
        if commands:
            yield commands, "\n".join((before.rpartition("\n\n")[2], block[0], after.partition("\n\n")[0]))


def all_commands() -> list[Command]:
    found = [each for page in PAGES for commands, _ in blocks(page) for each in commands]
    for page in PAGES:
        text = FENCE.sub("", (ROOT / page).read_text())
        spans = (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", text))
        found += [each for span in spans if (each := command(page, span)) and len(each.words) > 1]
    return found


COMMANDS = all_commands()


def of(program: str) -> list[Command]:
    return [each for each in COMMANDS if each.program == program]


def test_the_pages_are_read() -> None:
    assert len(of("webrl")) > 15
    assert len(of("sbatch")) > 4
    assert len(of("python")) > 1


@pytest.mark.parametrize("given", of("webrl"), ids=lambda each: each.text)
def test_a_webrl_command_is_accepted_by_its_parser(given: Command, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = given.words[1:]
    if any({"/", "."} & set(word) for word in arguments):
        cli._parse(arguments)
        return
    with pytest.raises(SystemExit) as end:  # only named, such as `webrl placement --memory`
        cli._parse([*arguments, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in arguments if word.startswith("--"))


@pytest.mark.parametrize("given", COMMANDS, ids=lambda each: each.text)
def test_files_of_the_repository_that_a_command_names_exist(given: Command) -> None:
    for path in OURS.findall(given.text):
        assert (ROOT / path).exists(), given.text


@pytest.mark.parametrize("given", of("sbatch") + of("bash"), ids=lambda each: each.text)
def test_a_script_of_slurm_is_named_after_options_and_before_overrides(given: Command) -> None:
    options = [word for word in given.words[1:] if word.startswith("--")]
    rest = [word for word in given.words[1:] if not word.startswith("--")]
    if not rest or given.words[1] == "...":
        assert options
        return  # options of sbatch on their own
    assert (ROOT / rest[0]).is_file(), given.text
    assert all("=" in word for word in rest[1:]), given.text


@pytest.mark.parametrize("given", [each for each in of("python") if each.words[1] == "-m"], ids=lambda each: each.text)
def test_a_module_of_the_repository_runs(given: Command) -> None:
    done = subprocess.run(
        ["python", "-m", given.words[2], "--help"],
        cwd=ROOT, env=command_environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for option in (word for word in given.words[3:] if word.startswith("--")):
        assert option in done.stdout


@pytest.mark.parametrize("given", of("make"), ids=lambda each: each.text)
def test_a_target_of_make_exists(given: Command) -> None:
    assert re.search(rf"^{given.words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), given.text


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_commands_says_whether_it_was_run(page: str) -> None:
    silent = [commands[0].text for commands, around in blocks(page) if not STATES.search(around)]
    assert not silent


PLACEMENTS = [each for each in of("webrl") if each.text.startswith("webrl placement configs/")]


@pytest.mark.parametrize("given", PLACEMENTS, ids=lambda each: each.text)
def test_the_placements_of_the_pages_are_possible(
    given: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    assert cli.main(given.words[1:]) == 0
    assert (tmp_path / "placement.json").exists() == ("--json" in given.words)
