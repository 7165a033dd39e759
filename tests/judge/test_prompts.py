"""Prompt files: complete, and their digest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.questions import PromptFiles
from megatron_webrl.judge.replies import VERDICT

PROMPTS = Path(__file__).parents[2] / "configs" / "judge"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PROMPTS, tmp_path / "prompts"))


def digest(folder: Path) -> str:
    return PromptFiles.load(folder, "webvoyager", ("outcome",)).digest


def test_the_digest_changes_with_every_file_of_the_protocol_and_no_other(folder: Path):
    first = digest(folder)
    (folder / "rubric" / "rubric.md").write_text("changed")
    assert digest(folder) == first
    changed = [folder / "webvoyager" / "outcome.md", *sorted((folder / "common").iterdir())]
    for path in changed:
        path.write_text(f"{path.name} changed")
    digests = {first}
    for path in changed:
        path.write_text("changed again")
        digests.add(digest(folder))
    assert len(digests) == len(changed) + 1


def test_a_system_message_says_what_fences_are_and_which_form_a_reply_has(folder: Path):
    files = PromptFiles.load(folder, "webvoyager", ("outcome",))
    for mode, needle in (("schema", '"verdict": "yes"'), ("line", "`VERDICT: yes`")):
        text = files.system_message("outcome", VERDICT, mode)
        assert text.startswith("You decide whether a web agent did its task.")
        assert "----- BEGIN" in text
        assert needle in text


def test_a_relative_folder_is_found_in_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert digest(Path("configs/judge")) == digest(PROMPTS)


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), (b"", "is empty"), (b"\xff", "not UTF-8")])
def test_a_prompt_that_cannot_be_read_is_refused(folder: Path, content: bytes | None, message: str):
    path = folder / "webvoyager" / "outcome.md"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"judge.prompts: {path}.*{message}"):
        digest(folder)
