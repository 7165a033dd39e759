"""configs/eval: each is checked by `webrl eval --check`, and judges scripted episodes of offline websites."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_webrl.cli import main
from megatron_webrl.config.schema import Config
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.launch.evaluation import EvaluatedCheckpoint, parse_evaluation_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.demonstrations import ScriptedGenerator
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.rollout.evaluator import make_result
from megatron_webrl.tasks.evaluation_count import evaluation_task_indices
from megatron_webrl.track.evaluations import aggregate_results, make_request
from megatron_webrl.types import Verdict
from tests.judge.support import endpoint_of
from tools import make_webgym_tasks
from tools.offline.site_truth import SiteTruth
from tools.offline.task_rows import read_truth

FOLDER = Path(__file__).parents[2] / "configs" / "eval"
NAMES = ("online_mind2web", "webgym_ood", "webvoyager")
TASKS = 3
FIRST_DENIED = 9000  # number of an offline website that denies access
NONE = Verdict("", "")


@pytest.fixture(scope="module")
def offline_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of offline websites, in the format of each benchmark."""
    folder = tmp_path_factory.mktemp("tasks")
    make_webgym_tasks.main([str(folder), "--tasks", "20", "--test", str(4 * TASKS)])
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    rows = [row for row in rows if int(re.findall("[0-9]+", row["website"])[0]) < FIRST_DENIED][:TASKS]
    levels = {n: "easy" if n <= 3 else "medium" if n <= 6 else "hard" for n in range(1, 99)}
    made: dict[str, list[dict[str, Any]]] = {
        "webgym_ood": rows,
        "online_mind2web": [
            {"task_id": row["task_id"], "confirmed_task": row["task_name"], "website": row["website"],
             "level": levels[row["difficulty"]]} for row in rows
        ],
        "webvoyager": [{"id": row["task_id"], "ques": row["task_name"], "web": row["website"]} for row in rows],
    }  # fmt: skip
    for name, each in made.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return folder


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.setenv(name, "placeholder")


def overrides(name: str, tasks: Path) -> list[str]:
    """What this machine needs: no GPU, a tiny model, no public websites."""
    return [
        f"tasks.test_file={tasks / name}.jsonl", "tasks.offline_websites=true", "browser.open_web=false",
        "cluster.gpus_per_node=0", "model.dtype=float32", "rollout.max_model_len=4096", "rollout.max_new_tokens=512",
    ]  # fmt: skip


def test_every_published_evaluation_is_listed_here():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_published_evaluation_is_checked_with_its_prompts(
    name: str, tiny_model: Path, offline_tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["eval", str(tiny_model), str(FOLDER / f"{name}.yaml"), "--check", f"run.directory={tmp_path}"]
    command += overrides(name, offline_tasks)
    assert main(command) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert (found["judge"]["evaluators"], found["tasks"]["train_file"]) == (["judge"], "")
    assert not list(tmp_path.iterdir())  # nothing was started
    assert main([*command, f"judge.prompts={tmp_path}"]) == 2
    assert "every stage of a protocol needs its file" in capsys.readouterr().err


def config_of(name: str, *chosen: str, tiny_model: Path, tasks: Path) -> Config:
    path = str(FOLDER / f"{name}.yaml")
    return parse_evaluation_config(EvaluatedCheckpoint.resolve(tiny_model), [path, *overrides(name, tasks), *chosen])


def test_limits_sampling_and_judges_are_those_published(tiny_model: Path, offline_tasks: Path):
    """Sources: the heads of the files."""
    found = {name: config_of(name, tiny_model=tiny_model, tasks=offline_tasks) for name in NAMES}
    sampling = {name: (c.evaluation.temperature, c.evaluation.top_p, c.evaluation.top_k) for name, c in found.items()}
    assert sampling == {"online_mind2web": (0.6, 0.95, 20), "webgym_ood": (0.6, 1.0, 0), "webvoyager": (1.0, 1.0, 0)}
    judges = {name: (c.judge.protocol, c.judge.verdict.name, c.judge.max_screenshots) for name, c in found.items()}
    assert judges == {
        "online_mind2web": ("webjudge", "o4-mini", 50), "webgym_ood": ("async_webrl", "gemini-2.5-flash", 48),
        "webvoyager": ("webvoyager", "gpt-4o", 15),
    }  # fmt: skip
    assert found["webgym_ood"].tasks.evaluation_max_steps_by_difficulty == {"easy": 30, "medium": 50, "hard": 70}
    assert [found[name].tasks.max_steps for name in ("online_mind2web", "webvoyager")] == [30, 15]
    assert all(config.evaluation.episodes == 0 for config in found.values())


def test_the_variants_that_the_files_name_can_be_chosen(tiny_model: Path, offline_tasks: Path):
    for name, protocol in (("online_mind2web", "agenttrek"), ("webgym_ood", "webgym")):
        text = (FOLDER / f"{name}.yaml").read_text()
        lines = [line.removeprefix("#     ") for line in text.splitlines() if line.startswith("#     ")]
        chosen = [word for line in lines for word in line.split() if "=" in word]
        found = config_of(name, *chosen, tiny_model=tiny_model, tasks=offline_tasks)
        assert found.judge.protocol == protocol


async def test_a_published_evaluation_judges_offline_episodes(
    tiny_model: Path, offline_tasks: Path, processor: Processor
):
    """Scripts act, and the endpoint decides by what the screenshots show: right answers succeed, as published."""
    async with endpoint_of(SiteTruth(read_truth(offline_tasks))) as (url, endpoint):
        chosen = [f"judge.verdict.url={url}", "browser.processes=1", "rollout.groups_in_flight=1"]
        config = config_of("webgym_ood", *chosen, tiny_model=tiny_model, tasks=offline_tasks)
        request = make_request(1, "checkpoint", "", evaluation_task_indices(config), config.evaluation, 0, True)
        async with EpisodeRunner.open(config, processor, "rollout-0", LocalMeter(config.judge.budget)) as runner:
            generator = ScriptedGenerator(processor, config.rollout)
            played = [await runner.run_held_out(generator, request, number) for number in range(request.episodes)]
    assert [each.outcome for each in played] == ["success"] * TASKS, [each.verdict for each in played]
    assert {stage.name for each in played for stage in (each.verdict or NONE).stages} == {
        "blocked", "relevance", "supported", "rubric"
    }  # fmt: skip
    assert endpoint.requests == sum((each.verdict or NONE).calls for each in played)
    line = aggregate_results(request, [make_result(each, 1.0) for each in played], 1.0)
    assert (line["evaluators"], line["temperature"], line["success_of_all"]) == (["async_webrl"], 0.6, 1.0)
    assert line["published"]["async_webrl"] == {"success": 1.0, "episodes": TASKS}
