"""The conversion tools as a user runs them: exit codes, error lines, interrupts, kills, memory."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.convert.conversion import ConversionOptions, hf_to_megatron
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.layout import ParallelSizes
from tests.model import tiny
from tests.model.convert import hf_folders
from tests.waiting import until
from tools import hf_to_megatron as there
from tools import megatron_to_hf as back
from tools.conversion import run_conversion

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0
MIB = 2**20
INTERVAL = 0.002  # seconds between two looks at a process


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of "dense", "tied" and "moe"."""
    folder = tmp_path_factory.mktemp("tools")
    hf_folders.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def large(models: Path) -> Path:
    """A model whose largest tensor is 64 MiB of 330."""
    folder = models / "large"
    description = tiny.configuration(tiny.Shape(layers=16))
    text = description.text_config
    text.vocab_size, text.hidden_size, text.intermediate_size = 32768, 1024, 2048
    description.vision_config.out_hidden_size = 1024
    description.save_pretrained(folder)
    shapes = {entry.hf_param: entry.tensor_shape for entry in parameter_mappings(load_hf_config(folder))}
    weights = {
        name: torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _start(tool: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, f"tools/{tool}.py", *map(str, arguments)], cwd=ROOT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _wait_for(process: subprocess.Popen[str], target: Path) -> Path:
    """The temporary folder, as soon as weights are being written to it."""
    left = target.with_name(f".{target.name}.writing")

    def writes() -> bool:
        assert process.poll() is None, process.communicate()
        return any(left.glob("megatron/*.distcp"))

    until(writes, "weights", SECONDS)
    return left


def test_there_and_back_says_what_was_written(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        there.main([f"{models / 'moe'}", f"{tmp_path / 'out'}", "--tp", "2", "--pp", "2", "--ep", "2", "--verify"]) == 0
    )
    assert back.main([f"{tmp_path / 'out'}", f"{tmp_path / 'back'}", "--shard-size", "300KB", "--verify"]) == 0
    expected = hf_folders.released(load_file(models / "moe/model.safetensors"))
    assert hf_folders.same(hf_folders.read(tmp_path / "back"), expected)
    captured = capsys.readouterr()
    size = sum(tensor.nbytes for tensor in expected.values())
    assert captured.out.splitlines()[1] == f"{tmp_path / 'back'}: {len(expected)} tensors, {size / 1e9:.3f} GB"
    assert captured.err == ""  # no progress bar where there is no terminal


def test_a_refusal_is_one_line_and_exits_with_2(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tool, source, options, words in (
        (there, "moe", ["--tp", "3"], "tensor_parallel=3 does not divide num_attention_heads=4"),
        (there, "nothing", [], "nothing is not a folder"),
        (back, "dense", [], "dense is no checkpoint: it holds no megatron/.metadata"),
    ):
        assert tool.main([str(models / source), str(tmp_path / "out"), *options]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{tool.__name__.removeprefix('tools.')}: ")
        assert words in line
    for text in ("0", "5 apples", "-1GB"):
        with pytest.raises(SystemExit, match="2"):
            back.main([str(tmp_path), str(tmp_path / "back"), f"--shard-size={text}"])
    assert not list(tmp_path.iterdir())


class Interrupted(io.BytesIO):
    """A file whose second write is interrupted."""

    def write(self, data: Any) -> int:
        if self.tell():
            signal.raise_signal(signal.SIGINT)
        return super().write(data)


def _interrupt_and_replace() -> Any:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ValueError("could not determine the shape") from None  # as torch's argument parser may


@pytest.mark.parametrize(
    "convert", [lambda: torch.save(torch.zeros(1000), Interrupted()), _interrupt_and_replace], ids=["write", "parser"]
)
def test_an_interrupt_is_one_whatever_is_raised_for_it(
    convert: Callable[[], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_conversion("tool", tmp_path, convert) == 130
    assert capsys.readouterr().err == "tool: interrupted; nothing was written\n"


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_and_a_kill_nothing_complete(models: Path, large: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    process = _start("hf_to_megatron", large, target)
    _wait_for(process, target)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=SECONDS)
    assert (process.returncode, error) == (130, "hf_to_megatron: interrupted; nothing was written\n")
    assert not list(tmp_path.iterdir())
    process = _start("hf_to_megatron", large, target)
    left = _wait_for(process, target)
    process.kill()
    process.communicate(timeout=SECONDS)
    assert left.is_dir()
    assert not target.exists()
    hf_to_megatron(models / "tied", target, ParallelSizes(), ConversionOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _peak(process: subprocess.Popen[str]) -> int:
    """Bytes of a process's anonymous memory at its highest. The mapped input is not among it: the system takes it back
    when it needs to."""
    status, peak, limit = Path(f"/proc/{process.pid}/status"), 0, time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < limit:
        lines = status.read_text().splitlines()
        peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))])
        time.sleep(INTERVAL)
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, error
    return peak


@pytest.mark.slow
def test_memory_grows_by_less_than_twice_the_largest_tensor(models: Path, large: Path, tmp_path: Path) -> None:
    largest, other = 64 * MIB, 32 * MIB  # `other`: Python's own memory, which differs from run to run
    size = (large / "model.safetensors").stat().st_size
    assert size > 2 * largest + other + 150 * MIB
    out = {name: tmp_path / name for name in ("tied", "large")}
    options = ["--tp", "2", "--pp", "2", "--verify"]
    peaks = {name: _peak(_start("hf_to_megatron", models / name, path, *options)) for name, path in out.items()}
    assert peaks["large"] - peaks["tied"] < 2 * largest + other, peaks
    options = ["--dtype", "float32", "--verify"]  # results are twice as large then
    peaks = {
        name: _peak(_start("megatron_to_hf", path, tmp_path / "back" / name, *options)) for name, path in out.items()
    }
    assert peaks["large"] - peaks["tied"] < 2 * (2 * largest) + other < 2 * size, peaks
