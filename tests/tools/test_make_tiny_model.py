"""The tiny model: what is in the folder, and that it is made again byte for byte."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.toolset import format_tool_call
from megatron_webrl.types import Action
from tools.make_tiny_model import main, make_tiny_model

SMALL = {"hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 96, "vision_hidden": 64}


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files_in_another_process(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "one", seed=5, **SMALL)
    options = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "tools.make_tiny_model", str(tmp_path / "two"), "--seed", "5", *options]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    one, other = digests(tmp_path / "one"), digests(make_tiny_model(tmp_path / "other", seed=6, **SMALL))
    assert one == digests(tmp_path / "two")
    assert {name for name in one if one[name] != other[name]} == {"model.safetensors"}


def test_the_tokenizer_keeps_any_text_has_qwens_tokens_and_takes_few_for_an_action(tiny_model: Path) -> None:
    processor = Processor.load(tiny_model)
    for action, most in (
        (Action("left_click", coordinate=(480, 120)), 8), (Action("scroll", direction="down"), 4),
        (Action("type", coordinate=(20, 1000), text="ok"), 12),
    ):  # fmt: skip
        ids = processor.encode_response(format_tool_call(action))
        assert len(ids) <= most
        assert processor.decode(ids) == format_tool_call(action)
    for text in ("Grüße, 你好 \U0001f642\n\n\t x 12345 1, 2,3 ", '{"a": [1, 2]}}\n', "\x00\x7f"):
        assert processor.decode(processor.encode_response(text)) == text
    reference = "<|im_start|> <|im_end|> <|endoftext|> <|vision_start|> <|image_pad|> <tool_call> </think>"
    assert set(reference.split()) <= set(processor.tokenizer.get_added_vocab())
    assert len(processor.tokenizer) <= 1024
    assert processor.tokenizer.eos_token == "<|im_end|>"


def test_a_folder_is_kept_without_force_and_sizes_must_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sizes, words in (
        ({"heads": 3, "kv_heads": 2}, "kv_heads=2 does not divide heads=3"),
        ({"experts": 4, "expert_intermediate": 64}, "must differ from hidden=128"),
        ({"vocabulary": 300}, "vocabulary=300 has no room"),
    ):
        with pytest.raises(ValueError, match=words):
            make_tiny_model(tmp_path / "mine", **sizes)
        assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    assert main([str(tmp_path / "mine")]) == 2
    assert "--force" in capsys.readouterr().err
    make_tiny_model(tmp_path / "mine", force=True, **SMALL)
    assert not (tmp_path / "mine" / "thesis.txt").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]
