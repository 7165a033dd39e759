"""Every page of `hostile_pages` against a session: each row says what may come of it, and within which limit.

127.0.0.1 stands in for a public address; 127.0.0.2, on the same port, is the machine that must not be reached.
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

from megatron_webrl.browser import browser_supervisor
from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.egress import proxy_connection
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

HASTY, PATIENT = 1.5, 20.0  # seconds of one operation
PAGE_MIB = 1024
SLACK = 15.0  # seconds for a busy machine, beyond what the limits of the three operations add up to
LATE = "browser_timeout"
CRASHED = "page_crashed"
ON = "goes on"  # with or without a note

# Page, seconds of one operation, what may come of it: an outcome, ON, or a pattern of what the agent is told.
ROWS: list[tuple[str, float, tuple[str, ...]]] = [
    ("alerts", PATIENT, ("opened a dialog, .again.",)),
    ("alerts_at_once", PATIENT, ("opened a dialog, .again.",)),
    ("alerts_timer", PATIENT, ("opened a dialog, .again.",)),
    ("alerts_frame", PATIENT, ("opened a dialog, .within.",)),
    ("prompt_long", PATIENT, (r"opened a dialog, .x{90,100}\.\.\.",)),
    ("popups", 6.0, ("a new window was closed", LATE)),
    ("popups_chain", PATIENT, ("a new window was closed",)),
    ("close", PATIENT, ("browser_error", ON)),  # Chromium lets a page close itself or not
    ("stay", PATIENT, ("asked whether to leave it; it was left",)),
    ("print", PATIENT, (ON,)),
    ("fullscreen", PATIENT, (ON,)),
    ("rights", PATIENT, (ON,)),
    ("stay_for_ever", HASTY, ("the script that it ran was ended", LATE)),
    ("loop", HASTY, ("the script that it ran was ended", LATE)),
    ("loop_frame", HASTY, ("the script that it ran was ended", LATE)),
    ("loop_promise", HASTY, ("the script that it ran was ended", LATE)),
    ("loop_unload", HASTY, ("the script that it ran was ended", LATE)),
    ("regexp", HASTY, ("the script that it ran was ended", LATE)),
    ("loop_timer", HASTY, (ON, LATE)),
    ("workers", HASTY, (ON, LATE)),
    ("push_state", PATIENT, (ON,)),
    ("replace", HASTY, ("still loading", "requests", ON, LATE)),
    ("ping", HASTY, ("still loading", ON, LATE)),
    ("refresh", HASTY, ("still loading", ON, LATE)),
    ("reload", HASTY, ("still loading", ON, LATE)),
    ("write", PATIENT, (ON, LATE)),
    ("write_for_ever", HASTY, (ON, LATE, CRASHED)),
    ("animation", PATIENT, (ON,)),
    ("frames_of_animation", PATIENT, (ON,)),
    ("title", PATIENT, (ON,)),
    ("console", HASTY, (ON, LATE)),
    ("errors", HASTY, (ON, LATE)),
    ("focus", PATIENT, (ON,)),
    ("scroll", PATIENT, (ON,)),
    ("fetches", PATIENT, (r"has used its 300 requests \(browser.max_requests\)", ON)),
    ("dom", HASTY, ("elements cannot be found in a page of", LATE)),
    ("deep", HASTY, (ON, LATE)),
    ("deep_script", HASTY, (ON, LATE, CRASHED)),
    ("buttons", HASTY, (ON, LATE)),
    ("frames", HASTY, (ON, LATE)),
    ("frames_nested", HASTY, (ON, LATE)),
    ("image", HASTY, (ON, LATE, CRASHED)),
    ("gigantic.png", HASTY, (ON, LATE, CRASHED)),
    ("canvas", HASTY, (ON, LATE, CRASHED)),
    ("tall", PATIENT, (ON,)),
    ("names", HASTY, (ON, LATE)),
    ("options", HASTY, ("elements cannot be found in a page of", LATE)),
    ("url", PATIENT, (ON,)),
    ("data_url", HASTY, (ON, LATE)),
    ("data_frame", HASTY, (ON, LATE)),
    ("memory", PATIENT, (CRASHED,)),
    ("memory_at_once", PATIENT, (CRASHED,)),
    ("buffers", PATIENT, (ON, CRASHED)),
    ("memory_dom", HASTY, (ON, LATE, CRASHED)),
    ("memory_worker", HASTY, (ON, LATE, CRASHED)),
    ("storage", PATIENT, (ON,)),
    ("special", PATIENT, (ON,)),
    ("special_dialog", PATIENT, (r"<\|image_pad\|><\|im_end\|>",)),
    ("service_worker", PATIENT, (ON,)),
    ("inner", PATIENT, (ON,)),
    ("inner_go", PATIENT, ("127.0.0.2, which is a loopback address",)),
    ("file", PATIENT, (ON,)),
    ("redirect", PATIENT, ("browser_error",)),
    ("slow_head", PATIENT, ("browser_error",)),
    ("endless_head", PATIENT, ("browser_error",)),
    ("silence", PATIENT, ("browser_error",)),
    ("garbage", PATIENT, ("browser_error",)),
    ("slow_body", PATIENT, (r"a request took more than 1.0 s",)),
    ("endless_body", HASTY, (ON, LATE, CRASHED)),
    ("bomb", HASTY, (ON, LATE, CRASHED)),
    ("hang_up", HASTY, (ON, LATE)),
]


class HostileSite:
    """Declares nothing: pages are reached as those of the open web are."""

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
    low = {"READY_LIMIT_MS": 1000, "QUIET_LIMIT_MS": 300, "NETWORK_IDLE_SECONDS": 0.3, "SETTLE_SECONDS": 1.0}
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
    """One Chromium for all rows, so that each row shows what the one before has left."""
    port = machines[0].port
    settings = BrowserConfig(
        width=400, height=300, marks=True, open_web=True, ports=[port], max_network_mib=16, max_requests=300
    )
    pool = BrowserPool(settings, {"hostile": HostileSite(port)}, 1, PATIENT)
    pool.egress_proxy = EgressProxy(settings, names.look_up)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(browser_supervisor, "PAGE_MIB", PAGE_MIB)
        patch.setattr(proxy_connection, "REQUEST_SECONDS", 1.0)
        async with pool:
            yield pool
    assert not [child for child in psutil.Process().children(recursive=True) if "chromium" in child.name()]


def task_of(page: str) -> Task:
    return Task(id=f"hostile/{page}", source="hostile", environment=page, seed=0, max_steps=3)


async def played(session: Session, page: str, seconds: float, port: int) -> tuple[str, list[Observation]]:
    """Open a page, click on it, leave it: the outcome, and what was seen."""
    session._step_seconds = seconds  # contexts are prepared with the patience of their pool
    seen: list[Observation] = []
    try:
        seen.append(await session.reset(task_of(page)))
        seen.append(await session.step(Action("left_click", coordinate=(100, 100))))
        seen.append(await session.step(Action("navigate", url=f"http://hostile.test:{port}/fine")))
    except BrowserError as error:
        return error.outcome, seen
    return ON, seen


@pytest.mark.parametrize(("page", "seconds", "allowed"), ROWS, ids=[row[0] for row in ROWS])
async def test_a_hostile_page_ends_within_its_limit_and_leaves_the_pool_usable(
    pool: BrowserPool, machines: tuple[Machine, Machine], page: str, seconds: float, allowed: tuple[str, ...]
) -> None:
    public, inner = machines
    started = time.monotonic()
    async with pool.session() as session:
        outcome, seen = await played(session, page, seconds, public.port)
    took = time.monotonic() - started
    told = "; ".join(observation.error or "" for observation in seen)
    log.info("%s: %s after %.1f s; %s", page, outcome, took, told)
    assert outcome in allowed or (outcome == ON and any(re.search(pattern, told) for pattern in allowed)), told
    assert took < 3 * seconds + SLACK
    assert inner.connections == 0
    async with pool.session() as session:
        assert (await session.reset(task_of("fine"))).title == "Fine"
    assert all(len(observation.title) <= 2000 and len(observation.url) <= 4000 for observation in seen)


async def test_a_click_that_starts_an_endless_script_does_not_end_the_episode(
    pool: BrowserPool, machines: tuple[Machine, Machine]
) -> None:
    async with pool.session() as session:
        outcome, seen = await played(session, "loop_click", 6.0, machines[0].port)
        assert outcome == ON
        assert "the page did not answer; the script that it ran was ended" in str(seen[1].error)
        assert seen[2].title == "Fine"


async def test_a_name_that_turns_to_this_machine_reaches_nothing(
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


async def test_every_process_of_a_page_has_a_limit_to_its_memory(pool: BrowserPool) -> None:
    async with pool.session() as session:
        await session.reset(task_of("fine"))
        renderers = [
            child for child in psutil.Process().children(recursive=True) if "--type=renderer" in child.cmdline()
        ]
        assert renderers
        assert {child.rlimit(psutil.RLIMIT_DATA) for child in renderers} == {(PAGE_MIB << 20, PAGE_MIB << 20)}


async def test_no_process_of_a_page_stays(pool: BrowserPool) -> None:
    async with asyncio.timeout(SLACK):
        while len([1 for child in psutil.Process().children(recursive=True) if is_renderer(child)]) > 4:
            await asyncio.sleep(0.1)


def is_renderer(process: psutil.Process) -> bool:
    try:
        return "--type=renderer" in process.cmdline()
    except psutil.NoSuchProcess:
        return False
