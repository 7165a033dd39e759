"""The Python interface: docs/python.md run as one script, its notebook, and what goes wrong."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl import api
from megatron_webrl.control.child_process import is_alive, start_time
from tests.documented_blocks import blocks_run_by
from tests.waiting import until

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = "docs/python.md", "docs/python.ipynb"
SMALL = [
    "trainer.updates=50", "trainer.groups_per_update=2", "rollout.group_size=4", "tasks.environments=[click-test]",
    *(f"evaluation.{name}=false" for name in ("before", "after", "greedy", "blank_images")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_is_a_script_that_runs(tmp_path: Path) -> None:
    script = "".join(blocks_run_by(__file__, PAGE, "python"))
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=560,
        check=True,
    ).stdout  # fmt: skip
    assert shown.count("update ") == 2
    assert shown.count("training miniwob/remember-sign-4-0/") >= 16
    assert "None success 2" in shown
    assert 0 <= float(shown.splitlines()[-1]) <= 1
    assert (tmp_path / "runs" / "from_python" / "summary.json").is_file()


def test_a_policy_acts_on_tasks_and_in_sessions() -> None:
    config = api.load_config("configs/quickstart.yaml", ["tasks.environments=[click-test]", "tasks.max_steps=2"])
    prompts = []

    async def wait(prompt: str, screenshots: Any) -> str:
        prompts.append((prompt, len(screenshots)))
        return '<tool_call>\n{"name": "computer_use", "arguments": {"action": "wait", "time": 0.1}}\n</tool_call>'

    def fail(prompt: str, screenshots: Any) -> str:
        raise ZeroDivisionError

    async def play() -> list[str]:
        async with api.open_rollouts(config, sessions=2) as rollouts:
            task = rollouts.held_out_task(0)
            with pytest.raises(ZeroDivisionError):
                await rollouts.run(fail, task)
            found = await asyncio.gather(rollouts.run(wait, task), rollouts.run(None, task))
            assert [step.action and step.action.kind for step in found[0].steps] == ["wait"] * 2
            return [each.outcome for each in found]

    assert asyncio.run(play()) == ["failure", "success"]
    assert len(prompts) == 2
    assert all("Task: " in prompt and prompt.count("<|image_pad|>") == images == 1 for prompt, images in prompts)


def test_what_is_wrong_is_an_error_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(api.ConfigError, match=r"unknown setting trainer.updatess"):
        api.load_config("configs/quickstart.yaml", ["trainer.updatess=1"])
    with pytest.raises(api.ConfigError, match="RUN=nothing is neither"):
        next(api.episodes("nothing"))
    with pytest.raises(api.JobError, match="webrl eval has failed: exited with code 2; last log line: webrl: "):
        api.evaluate("nothing")


@pytest.mark.slow
def test_a_job_ends_when_it_is_stopped_and_with_the_process_that_started_it(tmp_path: Path) -> None:
    config = api.load_config("configs/quickstart.yaml", [*SMALL, f"run.directory={tmp_path}", "run.name=stopped"])
    with api.train(config) as job:
        updates = job.updates()
        assert next(updates)["version"] == 1
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(0.1)
    assert not job.is_running
    assert json.loads((job.folder / "summary.json").read_text())["outcome"] == "stopped"
    program = f"""
import sys
from megatron_webrl import api
config = api.load_config("configs/quickstart.yaml", {[*SMALL, f"run.directory={tmp_path}", "run.name=killed"]!r})
job = api.train(config)
print(job._process.pid, flush=True)
job.wait()
"""
    starter = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    started = start_time(pid)
    time.sleep(1)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    until(lambda: not is_alive(pid, started), "the job's end", 30)


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = [cell for cell in json.loads((ROOT / NOTEBOOK).read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells:
        assert cell["outputs"] == []
        code = compile("".join(cell["source"]), NOTEBOOK, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        found = eval(code, names)  # our own notebook
        if asyncio.iscoroutine(found):
            asyncio.run(found)
    assert len(names["figure"].axes) >= 2
    assert names["trajectory"].outcome == "success"
