"""The Gymnasium environment, with a local server and on a browser server of others."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.gym import ActionSpace, WebEnv
from megatron_webrl.browser.server.local_servers import LocalServers
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.ring.segment import poll_with_backoff
from tests.browser.server.servers import browser_of, config_for, server_processes
from tests.documented_blocks import blocks_run_by

WAIT = json.dumps({"kind": "wait", "time": 0})


@pytest.fixture(scope="module")
def servers() -> Iterator[LocalServers]:
    servers = LocalServers(config_for(marks=True, actions=["switch_tab"]), sessions=2)
    servers.start()
    try:
        for _ in poll_with_backoff(120):
            if servers.poll_addresses():
                break
        yield servers
    finally:
        servers.close()


def on(servers: LocalServers, environment: str = "click-test", source: str = "miniwob", **settings: object) -> WebEnv:
    return WebEnv(source, environment, servers=servers.addresses()[0], token=servers.token, **settings)  # type: ignore[arg-type]


def test_an_environment_of_a_server_passes_gymnasiums_checks(servers: LocalServers) -> None:
    with closing(on(servers, render_mode="rgb_array")) as env:
        check_env(env)


@pytest.mark.slow
def test_an_environment_without_servers_starts_a_local_server() -> None:
    before = server_processes()
    with closing(gymnasium.make("webrl/miniwob.click-test-v0", width=160, height=210)) as env:
        seen, info = env.reset(seed=4)
        assert (seen["instruction"], seen["screenshot"].shape) == ("Click the button.", (210, 160, 3))
        again, same = env.reset(seed=4)
        assert info == same
        assert (seen["screenshot"] == again["screenshot"]).all()
        assert len(server_processes()) == len(before) + 1
    assert server_processes() == before


def test_a_click_ends_the_episode_and_the_last_step_and_a_browser_failure_truncate(servers: LocalServers) -> None:
    with closing(on(servers, max_steps=2)) as env:
        seen, _ = env.reset(seed=1)
        [button] = [one for one in seen["elements"] if one["role"] == "button"]
        assert [tab["active"] for tab in seen["tabs"]] == [1]
        _, reward, terminated, truncated, info = env.step(json.dumps({"kind": "click", "element_id": button["id"]}))
        assert (reward > 0.9, terminated, truncated) == (True, True, False)
        assert (info["outcome"], info["steps"]) == ("success", 1)
        with pytest.raises(ValueError, match="reset begins one"):
            env.step(WAIT)
        env.reset(seed=1)
        assert env.step(WAIT)[2:4] == (False, False)
        *_, terminated, truncated, info = env.step(WAIT)
        assert (terminated, truncated, info["outcome"]) == (False, True, "failure")
        env.reset(seed=1)
        [server] = server_processes()
        browser_of(server).kill()
        seen, reward, terminated, truncated, info = env.step(WAIT)
        assert (reward, terminated, truncated, info["outcome"]) == (0.0, False, True, "browser_crashed")
        assert "Chromium has ended" in seen["error"]
        assert seen in env.observation_space
        assert env.reset(seed=1)[0]["instruction"] == "Click the button."


def test_an_answer_is_compared_with_the_tasks_answer(servers: LocalServers) -> None:
    with closing(on(servers, "wiki-look-up", "sites")) as env:
        for right in (True, False):
            env.reset(seed=2)
            assert env._session.task is not None
            text = env._session.task.answer if right else "surely not"
            _, reward, terminated, truncated, info = env.step(json.dumps({"kind": "answer", "text": text}))
            assert (reward, terminated, truncated) == (float(right), True, False)
            assert info["outcome"] == ("success" if right else "failure")


def test_settings_of_other_servers_unknown_environments_and_invalid_actions_are_refused(servers: LocalServers) -> None:
    with pytest.raises(ConfigError, match=r"marks=False has no effect with servers=http"):
        on(servers, marks=False)
    with closing(on(servers, "click-tset")) as env, pytest.raises(ValueError, match=r"click-tset.*near: click-test"):
        env.reset()
    space = ActionSpace(marks=False)
    for action, message in (
        (3, "not a int"),
        ("click", "Invalid JSON"),
        ('{"kind": "juggle"}', "kind"),
        ('{"kind": "hover", "coordinate": [1, 1]}', "kind: hover is not one of left_click"),
        ('{"kind": "left_click", "coordinate": [1, 1001]}', "coordinate.1: Input should be less than or equal to 1000"),
        ('{"kind": "wait", "seconds": 3}', "seconds"),
    ):
        assert action not in space
        with pytest.raises(ValueError, match=message):
            space.parse(action)


@pytest.mark.parametrize("marks", [False, True])
def test_sampled_actions_are_valid_and_follow_the_seed(marks: bool) -> None:
    one, other = ([space.sample() for _ in range(50)] for space in (ActionSpace(marks, seed=7) for _ in range(2)))
    assert all(sample in ActionSpace(marks) for sample in one)
    assert one == other
    assert len(set(one)) > 20


def test_every_environment_is_registered() -> None:
    names = [name for name in gymnasium.registry if name.startswith("webrl/")]
    assert "webrl/sites.forms-vote-v0" in names
    assert len([name for name in names if name.startswith("webrl/miniwob.")]) > 100


def test_the_documented_example_runs(servers: LocalServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks_run_by(__file__, "docs/browser.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    script = tmp_path / "ten_lines.py"
    assert "http://127.0.0.1:8700" in code
    script.write_text(code.replace("http://127.0.0.1:8700", servers.addresses()[0]))
    monkeypatch.setenv(protocol.TOKEN_VARIABLE, servers.token)
    ran = runpy.run_path(str(script))
    assert isinstance(ran["observation"]["screenshot"], np.ndarray)
    assert ran["info"]["steps"] >= 1
