"""The examples of docs/extending.md, run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_webrl.config.advantage import advantage_config
from megatron_webrl.config.judge import JudgeModelConfig, judge_config
from megatron_webrl.config.loss import RewardConfig, loss_config
from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import open_evaluator
from megatron_webrl.launch.validation import check_job, load_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout import contexts
from megatron_webrl.rollout.episode_runner import find_reward, with_reward
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS, SiteTaskSource
from megatron_webrl.trainer.credit.advantages import step_advantages
from megatron_webrl.trainer.loss.objective import make_objective
from megatron_webrl.trainer.loss.token_data import TokenData
from megatron_webrl.trainer.metrics.token_metrics import loss_metrics
from megatron_webrl.types import Action, Group
from tests.documented_blocks import blocks_run_by
from tests.rollout.conversations import observation_of, response_of, texts
from tests.tasks.site_client import Client
from tests.trajectories import trajectory
from tools.judge_endpoint.oracle import TextOracle
from tools.judge_endpoint.server import EndpointOptions, serve_endpoint

PAGE = "docs/extending.md"


def example(section: str) -> dict[str, Any]:
    """The names that the code block under a heading defines."""
    (code,) = blocks_run_by(__file__, PAGE, "python", section)
    names: dict[str, Any] = {"__name__": f"extending.{section}"}
    exec(compile(code, PAGE, "exec"), names)  # the page is ours
    return names


def test_an_added_environment_is_solved_by_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    added = example("An environment")["environments"]
    assert set(added) == {"wiki-find-founding-year"}
    monkeypatch.setitem(ENVIRONMENTS, "wiki-find-founding-year", added["wiki-find-founding-year"])
    with SiteTaskSource(["wiki-find-founding-year"], TasksConfig(max_steps=5)) as source:
        for seed in range(3):
            task = source.make_task("wiki-find-founding-year", seed)
            client = Client(source.addresses["wiki.localhost"], source.start_episode(task))
            assert client.solve() == task.answer
            assert task.answer in client.html


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's project, installed into a folder of its own."""
    source, target = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("installed")
    (source / "my_agents").mkdir()
    for language in ("toml", "python"):
        for code in blocks_run_by(__file__, PAGE, language):
            name = code.partition("\n")[0].removeprefix("# ")
            if "/" in name or name.endswith(".toml"):
                (source / name).write_text(code)
    (source / "my_agents" / "__init__.py").touch()
    install = ["-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet", "--target", target, source]
    subprocess.run([sys.executable, *map(str, install)], check=True)
    assert len(list((target / "my_agents").glob("*.py"))) == 6
    return target


@pytest.fixture
def my_agents(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project, to be imported."""
    monkeypatch.syspath_prepend(project)
    return project


def tokens_of(
    current: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, weight: torch.Tensor
) -> TokenData:
    return TokenData(
        behaviour_logprobs=behaviour, proximal_logprobs=current, advantage=advantage, weight=weight,
        step_index=torch.zeros(5, dtype=torch.int64), step_lengths=torch.tensor([5.0]), versions=torch.zeros(5),
    )  # fmt: skip


def test_an_own_loss_has_the_policy_gradient_of_bounded_ratios(my_agents: Path) -> None:
    settings = loss_config("my_agents.losses:reinforce", options={"largest_ratio": 1.5}, kl_coefficient=0.1)
    rng = np.random.default_rng(0)
    advantage, weight, current, behaviour = (torch.tensor(rng.normal(size=5)) for _ in range(4))
    data = TokenData(
        behaviour_logprobs=behaviour, proximal_logprobs=current, reference_logprobs=current, advantage=advantage,
        weight=weight.abs(), step_index=torch.zeros(5, dtype=torch.int64), step_lengths=torch.tensor([5.0]),
        versions=torch.zeros(5),
    )  # fmt: skip
    current = current.clone().requires_grad_()
    value, sums = make_objective(settings, None)(current, data)
    value.backward()
    ratio = (current.detach() - behaviour).exp()
    torch.testing.assert_close(current.grad, -weight.abs() * advantage * ratio.clamp(max=1.5))  # on policy: no KL
    assert sums["own/ratio_bounded"] == (ratio > 1.5).sum()
    assert sums["reference_kl"] == 0
    totals = {name: float(total) for name, total in sums.items()} | {"response_tokens": 5.0, "success_tokens": 0.0}
    assert (
        loss_metrics(totals | {"entropy": 0.0, "success_entropy": 0.0})["own/ratio_bounded"] == (ratio > 1.5).sum() / 5
    )


def test_own_rewards_and_advantages_replace_those_of_the_package(my_agents: Path) -> None:
    rewards = RewardConfig(function="my_agents.credit:quick_success", options={"seconds": 10})
    group = [
        replace(trajectory(index=index, reward=reward, outcome=outcome), seconds=seconds)
        for index, (reward, outcome, seconds) in enumerate(
            [(1.0, "success", 0.0), (1.0, "success", 10.0), (0.0, "failure", 0.0), (0.0, "browser_error", 1.0)]
        )
    ]
    function = find_reward(rewards)
    assert function is not None
    rewarded = [with_reward(each, function) for each in group]
    assert [each.reward for each in rewarded] == [1.0, 0.5, 0.0, 0.0]
    config = Config()
    config.trainer.advantage = advantage_config("my_agents.credit:ranks")
    found = step_advantages([Group(0, tuple(rewarded))], config)
    assert {index: values.tolist() for index, values in found[0].items()} == {0: [1.0], 1: [0.0], 2: [-1.0]}


@pytest.mark.parametrize(("code", "problem"), [
    ("lambda groups: [[0.0] * len(groups[0])]", ""),
    ("lambda groups: []", r"advantages of \[\] episodes in the groups, which have \[2\]"),
    ("lambda groups: [[[1.0, 2.0, 3.0], [0.0]]]", r"\[3\] for an episode of 2 steps"),
    ("lambda groups: [[float('nan'), 0.0]]", "not finite numbers for an episode"),
])  # fmt: skip
def test_own_advantages_that_do_not_fit_are_refused(
    code: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"credit_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(f"function = {code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = Config()
    config.trainer.advantage = advantage_config(f"{name}:function")
    group = Group(0, (trajectory(index=0, steps=2, reward=1.0), trajectory(index=1, steps=2)))
    with pytest.raises(ValueError, match=problem) if problem else nullcontext():
        step_advantages([group], config)


@pytest.mark.parametrize("returned", ["1 / 0", "float('inf')", "'no number'"])
def test_an_own_reward_that_fails_masks_the_episode(
    returned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"reward_{abs(hash(returned))}"
    (tmp_path / f"{name}.py").write_text(f"def reward(trajectory):\n    return {returned}\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = find_reward(RewardConfig(function=f"{name}:reward"))
    assert function is not None
    masked = with_reward(trajectory(reward=1.0), function)
    assert (masked.outcome, masked.trainable) == ("reward_error", False)


def test_an_own_context_shows_one_screenshot_and_carries_the_fields_of_an_own_form(
    my_agents: Path, tiny_model: Path
) -> None:
    processor = Processor.load(tiny_model)
    settings = ContextConfig(
        policy="my_agents.contexts:NowAndThenContext", response_format="my_agents.contexts:PLAN",
        options={"summary_every": 3},
    )  # fmt: skip
    context = contexts.make_context(processor, settings, 100_000)
    context.start_episode("Buy a lamp", observation_of(0))
    seen = []
    for shade in (1, 2, 3):
        context.add_step(
            response_of(processor, f"Plan: look {shade} times\nAction: I look."), Action("wait", time=1.0), None,
            observation_of(shade),
        )  # fmt: skip
        prompt = context.build_prompt()
        assert prompt.image_indices.tolist() == [shade]
        seen.append(texts(processor, prompt)[-1])
    assert all(f"Plan of step {n}: look {n} times" in text for n, text in enumerate(seen, 1))
    assert ["Step 1" in text for text in seen] == [False, False, True]
    assert "Plan: a few words" in contexts.system_message(settings)


OWN = (
    "trainer.loss.name=my_agents.losses:reinforce", "trainer.loss.options={largest_ratio: 3}",
    "trainer.advantage.name=my_agents.credit:ranks",
    "trainer.reward.function=my_agents.credit:quick_success",
    "rollout.context.policy=my_agents.contexts:NowAndThenContext",
    "rollout.agent.name=my_agents.agents:ImpatientAgent", "rollout.agent.options.seconds=60",
)  # fmt: skip


@pytest.mark.parametrize(("setting", "message"), [
    ("trainer.loss.name=my_agents.losse:reinforce", "my_agents.losse cannot be imported: ModuleNotFoundError: No"),
    ("trainer.loss.name=my_agents.losses:reinforc", "my_agents.losses has no reinforc; near: reinforce"),
    ("trainer.advantage.name=my_agents.losses:reinforce", "cannot be called with (groups): missing a required argum"),
    ("trainer.loss.name=my_agents", "trainer.loss.name='my_agents' is not one of grpo, gspo, cispo, sapo, dppo, "),
    ("trainer.loss.options.ratio=2", "trainer.loss.options of my_agents.losses:reinforce: Key 'ratio' not in 'Op"),
    ("trainer.loss.options.largest_ratio=high", "Value 'high' of type 'str' could not be converted to Float; it has "),
    ("trainer.advantage.options.x=1", "options={'x': 1}, but my_agents.credit:ranks has no argument `options`; leave"),
    ("trainer.advantage.discount=.5", "trainer.advantage.discount=0.5 has no effect with trainer.advantage.name="),
    ("trainer.distillation={coefficient: 1, url: 'http://127.0.0.1:1/v1'}", "does not tell; choose a loss"),
    ("trainer.reward.function=quick", "trainer.reward.function=quick is not an import path such as my_package.my_modu"),
    ("rollout.context.policy=my_agents.agents:ImpatientAgent", "is no subclass of megatron_webrl.rollout.context"),
    ("rollout.context.policy=megatron_webrl.rollout.contexts:PromptContext", "does not implement build_prompt of"),
    ("rollout.context.response_format=my_agents.contexts:Options", "is an object of type type, not a ResponseForm"),
    ("rollout.agent.name=impatient", "rollout.agent.name='impatient' is not one of tool_calls, harness, nor an i"),
    ("judge.protocol=my_agents.credit:Options", "gives an object of type Options, not a JudgeProtocol"),
    ("judge.evaluators=[my_agents.credit:ranks,my_agents.credit:Nothing]", "my_agents.credit has no Nothing"),
])  # fmt: skip
def test_what_is_wrong_with_an_import_path_is_said_in_one_line(my_agents: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_job(load_config("configs/quickstart.yaml", [*OWN, setting]))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.asyncio
async def test_an_own_protocol_asks_the_judge(my_agents: Path) -> None:
    options = EndpointOptions(TextOracle())
    async with serve_endpoint(options) as (url, endpoint):
        settings = judge_config(
            "my_agents.judging:last_look", evaluators=["judge"], verdict=JudgeModelConfig("oracle", url),
            options={"screenshots": 2},
        )  # fmt: skip
        async with open_evaluator(settings, LocalMeter(settings.budget)) as evaluator:
            verdict = await evaluator.evaluate(replace(trajectory(steps=3), end_reason="done"))
        assert (verdict.outcome, verdict.protocol) == ("success", "my_agents.judging:last_look")
        assert endpoint.replies == {"outcome": 1}


@pytest.mark.slow
def test_a_job_trains_with_a_project_of_its_own(project: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "own"
    command = [
        sys.executable, "-m", "megatron_webrl", "train", "configs/quickstart.yaml", *OWN, "run.name=own",
        f"run.directory={tmp_path / 'runs'}", "trainer.updates=2", "trainer.groups_per_update=2",
        "rollout.group_size=4", "trainer.checkpoint.every=0",
        *(f"evaluation.{name}=false" for name in ("before", "after", "greedy", "blank_images")),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(project)}
    subprocess.run(command, env=environment, check=True, timeout=280, stdout=subprocess.DEVNULL)
    updates = [json.loads(line) for line in (run / "updates.jsonl").read_text().splitlines()]
    assert len(updates) == 2
    assert all("own/ratio_bounded" in json.dumps(update) for update in updates)
    code = json.loads((run / "own_code.json").read_text())
    assert {path: entry["setting"] for path, entry in code.items()} == {
        setting.partition("=")[2]: setting.partition("=")[0] for setting in OWN if "options" not in setting
    }
    for entry in code.values():
        assert entry["sha256"] == hashlib.sha256(Path(entry["file"]).read_bytes()).hexdigest()
        assert Path(entry["file"]).is_relative_to(project)


def test_the_parameter_map_passes_its_first_test(tiny_model: Path) -> None:
    names = example("A model")
    assert names["missing_and_unknown"](str(tiny_model)) == (set(), set())
    assert names["sharded_elements"](str(tiny_model), 1) == names["sharded_elements"](str(tiny_model), 2)
