"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import guard, model_runner
from tools.make_tiny_model import make_tiny_model

# Shells start commands in the background with SIGINT ignored, and what tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests run in several processes at the same time, and threads that wait for each other keep cores busy.
torch.set_num_threads(1)
# On a busy machine an example may wait for a processor.
hypothesis.settings.register_profile("no_deadline", deadline=None, max_examples=40)
hypothesis.settings.load_profile("no_deadline")


CPU_BEFORE = pytest.StashKey[os.times_result]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--v2", action="store_true", help="only tests of engines, with vLLM's model runner V2")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--v2"):
        model_runner.select_v2()
    if not hasattr(config, "workerinput"):  # the processes of a parallel run are descendants of the first
        guard.start()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without garbage collections, which would look at what imports keep; none does afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    gc.freeze()  # the interpreter's last collection takes seconds otherwise


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of the model runner; those with the longest limits of time come first.

    Then parallel processes end at about the same time.
    """
    v2 = config.getoption("--v2")
    config.hook.pytest_deselected(items=[item for item in items if not runs_with(item, v2)])
    items[:] = [item for item in items if runs_with(item, v2)]
    limits: dict[Path, float] = defaultdict(float)
    for item in items:
        if (limit := item.get_closest_marker("timeout")) and not item.get_closest_marker("soak"):
            limits[item.path] = max(limits[item.path], *limit.args)
    items.sort(key=lambda item: -limits[item.path])


def runs_with(item: pytest.Item, v2: bool) -> bool:
    """Whether a test runs with the chosen model runner of vLLM."""
    if item.get_closest_marker("only_v2"):
        return v2
    return not v2 or item.get_closest_marker("engine") is not None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why tests ran twice: one that fails now and then has found a fault."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.write_sep("_", f"{report.nodeid} failed once")
        terminalreporter.write_line(report.longreprtext[-4000:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note where a test's processor time begins; its teardown reports what was used."""
    item.stash[CPU_BEFORE] = os.times()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    before, after = item.stash[CPU_BEFORE], os.times()
    item.user_properties.append(("own_cpu", round(sum(after[:2]) - sum(before[:2]), 2)))
    item.user_properties.append(("children_cpu", round(sum(after[2:4]) - sum(before[2:4]), 2)))
    return result


@pytest.fixture(autouse=True, scope="module")
def _environment_stays() -> Iterator[None]:
    """An engine sets variables for its subprocesses; those of later modules must not inherit them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checks of a configuration see another user than root, for whom some settings are refused."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process is the only rank of torch.distributed."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with random weights, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def tiny_sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a mixture of four experts."""
    folder = tmp_path_factory.mktemp("models") / "tiny-sparse"
    make_tiny_model(folder, seed=1, experts=4)
    return folder
