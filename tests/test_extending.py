"""The examples of docs/extending.md, run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_webrl.config.loss import LossConfig
from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout import contexts
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS, SiteTaskSource
from megatron_webrl.trainer.loss import objective
from megatron_webrl.trainer.loss.token_data import TokenData
from megatron_webrl.types import Action, Group
from tests.documented_blocks import blocks_run_by
from tests.rollout.conversations import observation_of, response_of, texts
from tests.tasks.site_client import Client
from tests.trajectories import trajectory

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


def test_an_added_reward_prefers_the_shorter_of_two_successes() -> None:
    advantages = example("A reward")["advantages"]
    short, long = trajectory(index=0, steps=1, reward=1.0), trajectory(index=1, steps=4, reward=1.0)
    found = advantages(Group(0, [short, long, trajectory(index=2, steps=2)]))
    assert found[0] > found[1] > found[2]
    assert sum(found.values()) == pytest.approx(0)


def test_an_added_loss_has_the_policy_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "OBJECTIVES", dict(objective.OBJECTIVES))
    example("A loss")
    reinforce = objective.make_objective(LossConfig(name="reinforce"), None)
    rng = np.random.default_rng(0)
    advantage, weight, current = (torch.tensor(rng.normal(size=5)) for _ in range(3))
    data = TokenData(
        behaviour_logprobs=current, proximal_logprobs=current, advantage=advantage, weight=weight,
        step_index=torch.zeros(5, dtype=torch.int64), step_lengths=torch.tensor([5.0]), versions=torch.zeros(5),
    )  # fmt: skip
    current = current.clone().requires_grad_()
    value, metrics = reinforce(current, data)
    value.backward()
    assert torch.equal(current.grad, -weight * advantage)
    assert metrics["response_tokens"] == 5


def test_an_added_context_policy_shows_one_screenshot(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "POLICIES", dict(contexts.POLICIES))
    example("A context policy")
    processor = Processor.load(tiny_model)
    context = contexts.make_context(processor, ContextConfig(policy="latest"), 100_000)
    context.start_episode("Buy a lamp", observation_of(0))
    for shade in (1, 2):
        answer = response_of(processor, "I look around.")
        context.add_step(answer, Action("wait", time=1.0), None, observation_of(shade))
    prompt = context.build_prompt()
    assert prompt.image_indices.tolist() == [2]
    assert "Buy a lamp" in texts(processor, prompt)[-1]


def test_the_parameter_map_passes_its_first_test(tiny_model: Path) -> None:
    names = example("A model")
    assert names["missing_and_unknown"](str(tiny_model)) == (set(), set())
    assert names["sharded_elements"](str(tiny_model), 1) == names["sharded_elements"](str(tiny_model), 2)
