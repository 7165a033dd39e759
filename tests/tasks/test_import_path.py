"""A task source by import path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl.config.import_path import named_in
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.tasks.evaluation_count import evaluation_task_indices
from megatron_webrl.tasks.registry import make_all_sources, make_source

MODULE = """
from megatron_webrl.tasks.web_pages import WebPageSource
from megatron_webrl.types import Task

NUMBER = 5


class Source(WebPageSource):
    environments = ("docs",)

    def make_task(self, environment, seed):
        return Task(f"docs/{seed}", "web", environment, seed, self.settings.max_steps, url="https://example.com")

    def training_task(self, seed, ticket, knowledge=None):
        return self.make_task("docs", ticket)

    def held_out_task(self, index):
        return self.make_task("docs", 2**30 + index)


class Nothing(Source):
    environments = ()


def make(tasks):
    return Source(tasks)


class Incomplete:
    environments = ("docs",)
    origins = frozenset()
    make_task = training_task = held_out_task = open = result = close = lambda self, *rest: None

    def __init__(self, tasks):
        pass


def without_arguments():
    return None
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_tasks").mkdir()
    (tmp_path / "own_tasks" / "pages.py").write_text(MODULE)
    (tmp_path / "own_tasks" / "broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("own_tasks")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["Source", "make"])
def test_a_class_or_a_function_makes_the_source(name: str) -> None:
    settings = tasks_config(source=f"own_tasks.pages:{name}", max_steps=7)
    source = make_source(settings)
    assert (source.environments, source.origins, dict(source.addresses)) == (("docs",), frozenset(), {})
    assert source.training_task(0, 4).max_steps == 7
    source.close()
    config = Config(tasks=settings)
    config.evaluation.skip, config.evaluation.episodes = 4, 9
    assert evaluation_task_indices(config) == range(4, 13)
    config.evaluation.skip = config.evaluation.episodes = 0
    with pytest.raises(ConfigError, match=r"evaluation.episodes=0 is no held-out task of this source; raise it"):
        evaluation_task_indices(config)
    sources = make_all_sources(settings)  # of a browser server
    assert list(sources) == ["miniwob", "sites", settings.source]
    assert sources[settings.source].make_task("docs", 1).id == "docs/1"
    for source in sources.values():
        source.close()


def test_a_source_within_a_mix_is_named_and_served() -> None:
    own = "own_tasks.pages:Source"
    config = Config(tasks=tasks_config("mix", mix=[{"source": "miniwob"}, {"source": own, "name": "own"}]))
    assert named_in(config) == {"tasks.mix.own.source": [own]}
    sources = make_all_sources(config.tasks)
    assert list(sources) == ["miniwob", "sites", own]
    for source in sources.values():
        source.close()


def test_what_is_no_source_is_refused_in_one_line() -> None:
    for path, message in (
        ("own_tasks.broken:Source", "own_tasks.broken cannot be imported: ModuleNotFoundError: No module named 'no_s"),
        ("own_tasks.pages:Sorce", "own_tasks.pages has no Sorce; near: Source"),
        ("own_tasks.pages:NUMBER", "is an object of type int, not a class or a function"),
        ("own_tasks.pages:Incomplete", "it has no evaluation_tasks, can_reuse_page, demonstrate, addresses"),
        ("own_tasks.pages:without_arguments", "cannot be called with the settings of tasks: without_arg"),
        ("own_tasks.pages:Nothing", "has no environments; name at least one"),
        ("own tasks:Source", "is not an import path such as my_package.my_module:name"),
    ):
        with pytest.raises(ConfigError) as caught:
            make_source(tasks_config(source=path))
        assert str(caught.value).startswith(f"tasks.source={path}")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^tasks\.source='webgim' is not one of .* import path.*; near: webgym"):
        make_source(tasks_config(source="webgim"))
