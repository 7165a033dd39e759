"""Every page of `hostile_pages` against a session: each case has its allowed results and a time limit.

127.0.0.1 stands in for a public address; 127.0.0.2, on the same port, must not be reached.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

import psutil
import pytest
import pytest_asyncio
from playwright.async_api import Page

from megatron_webrl.browser import browser_pool
from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.egress import connections
from megatron_webrl.browser.egress.egress_proxy import EgressProxy
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.page import settle
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import Action, Observation, Task
from tests.browser.hostile_pages import Machine
from tests.browser.local_network import FORBIDDEN, NameService

pytestmark = pytest.mark.asyncio(loop_scope="module")

log = logging.getLogger(__name__)

SHORT, LONG = 1.5, 20.0  # seconds of one operation
PAGE_MIB = 1024
SLACK = 15.0  # seconds for a busy machine, beyond the limits of the three operations
TIMEOUT = "browser_timeout"
CRASHED = "page_crashed"
CONTINUES = "continues"  # with or without a message

# Page, seconds of one operation, allowed results: an outcome, CONTINUES, or a pattern of the messages.
CASES: list[tuple[str, float, tuple[str, ...]]] = [
    ("alerts", LONG, ("opened a dialog, .again.",)),
    ("alerts_at_once", LONG, ("opened a dialog, .again.",)),
    ("alerts_timer", LONG, ("opened a dialog, .again.",)),
    ("alerts_frame", LONG, ("opened a dialog, .within.",)),
    ("prompt_long", LONG, (r"opened a dialog, .x{90,100}\.\.\.",)),
    ("popups", 6.0, ("a new window was closed", TIMEOUT)),
    ("popups_chain", LONG, ("a new window was closed",)),
    ("close", LONG, ("browser_error", CONTINUES)),  # Chromium lets a page close itself or not
    ("stay", LONG, ("asked whether to leave it; it was left",)),
    ("print", LONG, (CONTINUES,)),
    ("fullscreen", LONG, (CONTINUES,)),
    ("rights", LONG, (CONTINUES,)),
    ("stay_for_ever", SHORT, ("the script that it ran was ended", TIMEOUT)),
    ("loop", SHORT, ("the script that it ran was ended", TIMEOUT)),
    ("loop_frame", SHORT, ("the script that it ran was ended", TIMEOUT)),
    ("loop_promise", SHORT, ("the script that it ran was ended", TIMEOUT)),
    ("loop_unload", SHORT, ("the script that it ran was ended", TIMEOUT)),
    ("regexp", SHORT, ("the script that it ran was ended", TIMEOUT)),
    ("loop_timer", SHORT, (CONTINUES, TIMEOUT)),
    ("workers", SHORT, (CONTINUES, TIMEOUT)),
    ("push_state", LONG, (CONTINUES,)),
    ("replace", SHORT, ("still loading", "requests", CONTINUES, TIMEOUT)),
    ("ping", SHORT, ("still loading", CONTINUES, TIMEOUT)),
    ("refresh", SHORT, ("still loading", CONTINUES, TIMEOUT)),
    ("reload", SHORT, ("still loading", CONTINUES, TIMEOUT)),
    ("write", LONG, (CONTINUES, TIMEOUT)),
    ("write_for_ever", SHORT, (CONTINUES, TIMEOUT, CRASHED)),
    ("animation", LONG, (CONTINUES,)),
    ("frames_of_animation", LONG, (CONTINUES,)),
    ("title", LONG, (CONTINUES,)),
    ("console", SHORT, (CONTINUES, TIMEOUT)),
    ("errors", SHORT, (CONTINUES, TIMEOUT)),
    ("focus", LONG, (CONTINUES,)),
    ("scroll", LONG, (CONTINUES,)),
    ("fetches", LONG, (r"has used its 300 requests \(browser.max_requests\)", CONTINUES)),
    ("dom", SHORT, ("elements cannot be found in a page of", TIMEOUT)),
    ("deep", SHORT, (CONTINUES, TIMEOUT)),
    ("deep_script", SHORT, (CONTINUES, TIMEOUT, CRASHED)),
    ("buttons", SHORT, (CONTINUES, TIMEOUT)),
    ("frames", SHORT, (CONTINUES, TIMEOUT)),
    ("frames_nested", SHORT, (CONTINUES, TIMEOUT)),
    ("image", SHORT, (CONTINUES, TIMEOUT, CRASHED)),
    ("gigantic.png", SHORT, (CONTINUES, TIMEOUT, CRASHED)),
    ("canvas", SHORT, (CONTINUES, TIMEOUT, CRASHED)),
    ("tall", LONG, (CONTINUES,)),
    ("names", SHORT, (CONTINUES, TIMEOUT)),
    ("options", SHORT, ("elements cannot be found in a page of", TIMEOUT)),
    ("url", LONG, (CONTINUES,)),
    ("data_url", SHORT, (CONTINUES, TIMEOUT)),
    ("data_frame", SHORT, (CONTINUES, TIMEOUT)),
    ("memory", LONG, (CRASHED,)),
    ("memory_at_once", LONG, (CRASHED,)),
    ("buffers", LONG, (CONTINUES, CRASHED)),
    ("memory_dom", SHORT, (CONTINUES, TIMEOUT, CRASHED)),
    ("memory_worker", SHORT, (CONTINUES, TIMEOUT, CRASHED)),
    ("storage", LONG, (CONTINUES,)),
    ("special", LONG, (CONTINUES,)),
    ("special_dialog", LONG, (r"<\|image_pad\|><\|im_end\|>",)),
    ("service_worker", LONG, (CONTINUES,)),
    ("inner", LONG, (CONTINUES,)),
    ("inner_go", LONG, ("127.0.0.2, which is a loopback address",)),
    ("file", LONG, (CONTINUES,)),
    ("redirect", LONG, ("browser_error",)),
    ("slow_head", LONG, ("browser_error",)),
    ("endless_head", LONG, ("browser_error",)),
    ("silence", LONG, ("browser_error",)),
    ("garbage", LONG, ("browser_error",)),
    ("slow_body", LONG, (r"a request took more than 1.0 s",)),
    ("endless_body", SHORT, (CONTINUES, TIMEOUT, CRASHED)),
    ("bomb", SHORT, (CONTINUES, TIMEOUT, CRASHED)),
    ("hang_up", SHORT, (CONTINUES, TIMEOUT)),
]


class HostileSite:
    """Declares no origins: its pages count as the open web."""

    origins: frozenset[str] = frozenset()
    addresses: Mapping[str, str] = MappingProxyType({})

    def __init__(self, port: int) -> None:
        self.origin = f"http://hostile.test:{port}"

    def can_reuse_page(self, task: Task) -> bool:
        return False

    async def open(self, page: Page, task: Task) -> str:
        await page.goto(f"{self.origin}/{task.environment}", wait_until="commit")
        return "look"

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        return None, False


names = NameService()


@pytest.fixture(autouse=True)
def low_limits(first_loopback_is_public: None, monkeypatch: pytest.MonkeyPatch) -> None:
    low = {"LOAD_SECONDS": 1.0, "QUIET_LIMIT_MS": 300, "NETWORK_IDLE_SECONDS": 0.3, "SETTLE_SECONDS": 1.0}
    for name, value in low.items():
        monkeypatch.setattr(settle, name, value)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines() -> AsyncIterator[tuple[Machine, Machine]]:
    public, inner = Machine("127.0.0.1"), Machine(FORBIDDEN)
    await public.start()
    await inner.start(public.port)
    yield public, inner
    public.close()
    inner.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(machines: tuple[Machine, Machine]) -> AsyncIterator[BrowserPool]:
    """One Chromium for all cases, so that each case runs after the leftovers of the previous ones."""
    port = machines[0].port
    settings = BrowserConfig(
        width=400, height=300, marks=True, open_web=True, ports=[port], max_network_mib=16, max_requests=300
    )
    pool = BrowserPool(settings, {"hostile": HostileSite(port)}, 1, LONG)
    pool.egress_proxy = EgressProxy(settings, names.look_up)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(browser_pool, "PAGE_MIB", PAGE_MIB)
        patch.setattr(connections, "REQUEST_SECONDS", 1.0)
        async with pool:
            yield pool
    assert not [child for child in psutil.Process().children(recursive=True) if "chromium" in child.name()]


def task_of(page: str) -> Task:
    return Task(id=f"hostile/{page}", source="hostile", environment=page, seed=0, max_steps=3)


async def play(session: Session, page: str, seconds: float, port: int) -> tuple[str, list[Observation]]:
    """Open a page, click on it, leave it; returns the outcome and the observations."""
    session._step_seconds = seconds  # the session was prepared with the limit of the pool
    seen: list[Observation] = []
    try:
        seen.append(await session.reset(task_of(page)))
        seen.append(await session.step(Action("left_click", coordinate=(100, 100))))
        seen.append(await session.step(Action("navigate", url=f"http://hostile.test:{port}/fine")))
    except BrowserError as error:
        return error.outcome, seen
    return CONTINUES, seen


@pytest.mark.parametrize(("page", "seconds", "allowed"), CASES, ids=[case[0] for case in CASES])
async def test_a_hostile_page_ends_within_its_limit_and_leaves_the_pool_usable(
    pool: BrowserPool, machines: tuple[Machine, Machine], page: str, seconds: float, allowed: tuple[str, ...]
) -> None:
    public, inner = machines
    started = time.monotonic()
    async with pool.session() as session:
        outcome, seen = await play(session, page, seconds, public.port)
    duration = time.monotonic() - started
    messages = "; ".join(observation.error or "" for observation in seen)
    log.info("%s: %s after %.1f s; %s", page, outcome, duration, messages)
    assert outcome in allowed or (outcome == CONTINUES and any(re.search(pattern, messages) for pattern in allowed)), (
        messages
    )
    assert duration < 3 * seconds + SLACK
    assert inner.connections == 0
    async with pool.session() as session:
        assert (await session.reset(task_of("fine"))).title == "Fine"
    assert all(len(observation.title) <= 2000 and len(observation.url) <= 4000 for observation in seen)


async def test_a_click_that_starts_an_endless_script_does_not_end_the_episode(
    pool: BrowserPool, machines: tuple[Machine, Machine]
) -> None:
    async with pool.session() as session:
        outcome, seen = await play(session, "loop_click", 6.0, machines[0].port)
        assert outcome == CONTINUES
        assert "the page did not answer; the script that it ran was ended" in str(seen[1].error)
        assert seen[2].title == "Fine"


async def test_a_name_that_changes_to_a_loopback_address_reaches_nothing(
    pool: BrowserPool, machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool.session() as session:
        await session.reset(task_of("rebind"))
        await session.step(Action("left_click", coordinate=(100, 100)))
        monkeypatch.setitem(names.answers, "hostile.test", [FORBIDDEN])
        async with asyncio.timeout(SLACK):
            while not session.network.refused["loopback"]:
                await session.step(Action("wait", time=0.1))
        assert machines[1].connections == 0


async def test_every_renderer_has_a_memory_limit(pool: BrowserPool) -> None:
    async with pool.session() as session:
        await session.reset(task_of("fine"))
        renderers = [
            child for child in psutil.Process().children(recursive=True) if "--type=renderer" in child.cmdline()
        ]
        assert renderers
        assert {child.rlimit(psutil.RLIMIT_DATA) for child in renderers} == {(PAGE_MIB << 20, PAGE_MIB << 20)}


async def test_renderers_end_with_their_sessions(pool: BrowserPool) -> None:
    async with asyncio.timeout(SLACK):
        while len([1 for child in psutil.Process().children(recursive=True) if is_renderer(child)]) > 4:
            await asyncio.sleep(0.1)


def is_renderer(process: psutil.Process) -> bool:
    try:
        return "--type=renderer" in process.cmdline()
    except psutil.NoSuchProcess:
        return False
