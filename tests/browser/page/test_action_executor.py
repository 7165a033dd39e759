"""Every action, by coordinates and by numbered elements, on one page that logs what happens to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.page import tabs
from megatron_webrl.browser.page.tabs import Tab
from megatron_webrl.browser.session import Session
from megatron_webrl.types import OPTIONAL_ACTION_KINDS, Action, Observation
from tests.browser.conftest import ORIGIN, FolderSite, page_task, pool_on, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGES = {
    "gym": """<title>Gym</title><style>
        body { margin: 0; } body > * { position: absolute; width: 110px; height: 40px; box-sizing: border-box; }
      </style>
      <button aria-label=press style="left:10px;top:10px">Press</button>
      <input aria-label=field value="old words" style="left:140px;top:10px">
      <select aria-label=size style="left:270px;top:10px"><option>Small<option value=m>Medium<option disabled>Large
      </select>
      <div aria-label=thing role=button draggable=true style="left:10px;top:80px;background:#9cf">thing</div>
      <div aria-label=zone role=button style="left:140px;top:80px;background:#fc9">zone</div>
      <div aria-label=inner role=button tabindex=0 style="left:270px;top:80px;height:100px;overflow:auto">
        <p style="height:900px">long</p></div>
      <a aria-label=link href=other.html target=_blank style="left:10px;top:150px">link</a>
      <a aria-label=plain href=other.html style="left:140px;top:150px">plain</a>
      <script>
        window.log = [];
        const named = (event) => log.push(`${event.type} ${event.target.getAttribute?.("aria-label")}`);
        for (const type of ["click", "dblclick", "contextmenu", "mouseover", "change", "drop"])
          addEventListener(type, named);
        addEventListener("keydown", (e) => log.push(`${e.ctrlKey ? "ctrl " : ""}${e.key}`));
        document.querySelector("[aria-label=zone]").addEventListener("dragover", (e) => e.preventDefault());
      </script>""",
    "other": "<title>Other</title>other",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderSite]:
    with serving(FolderSite, tmp_path_factory.mktemp("gym"), PAGES) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["coordinates", "marks"])
async def pool(site: FolderSite, request: pytest.FixtureRequest) -> AsyncIterator[BrowserPool]:
    with mock.patch("megatron_webrl.browser.session.MAX_TABS", 3):
        async with pool_on(site, marks=request.param, actions=list(OPTIONAL_ACTION_KINDS)) as pool:
            yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def session(pool: BrowserPool) -> AsyncIterator[Session]:
    async with pool.session() as session:
        yield session


class Gym:
    """The page with its latest observation; addresses elements by coordinate or by number."""

    def __init__(self, session: Session, seen: Observation) -> None:
        self.session, self.seen = session, seen

    @classmethod
    async def open(cls, session: Session) -> Gym:
        return cls(session, await session.reset(page_task("gym")))

    @property
    def marks(self) -> bool:
        return self.seen.elements is not None

    async def target(self, name: str, end: bool = False) -> dict[str, Any]:
        if self.seen.elements is not None:
            [number] = [element.id for element in self.seen.elements if element.name == name]
            return {"end_element_id" if end else "element_id": number}
        box = await self.session.page.locator(f"[aria-label={name}]").bounding_box()
        assert box is not None
        x, y = (box["x"] + box["width"] / 2) / 400, (box["y"] + box["height"] / 2) / 300
        return {"end_coordinate" if end else "coordinate": (round(1000 * x), round(1000 * y))}

    async def act(self, kind: str, **arguments: Any) -> Observation:
        self.seen = await self.session.step(Action(kind, **arguments))  # type: ignore[arg-type]
        return self.seen

    async def log(self) -> list[str]:
        return await self.session.page.evaluate("log.splice(0)")


async def test_a_click_hits_the_element(session: Session) -> None:
    gym = await Gym.open(session)
    await gym.act("click" if gym.marks else "left_click", **await gym.target("press"))
    assert (await gym.log())[-1] == "click press"


async def test_double_and_right_clicks_fire_their_events(session: Session) -> None:
    gym = await Gym.open(session)
    await gym.act("double_click", **await gym.target("press"))
    assert (await gym.log())[-1] == "dblclick press"
    await gym.act("right_click", **await gym.target("press"))
    assert (await gym.log())[-1] == "contextmenu press"


async def test_hovering_moves_the_mouse_and_clicks_nothing(session: Session) -> None:
    gym = await Gym.open(session)
    await gym.act("hover", **await gym.target("thing"))
    log = await gym.log()
    assert log[-1] == "mouseover thing"
    assert "click thing" not in log


async def test_dragging_drops_one_element_on_another(session: Session) -> None:
    gym = await Gym.open(session)
    await gym.act("drag", **await gym.target("thing"), **await gym.target("zone", end=True))
    assert "drop zone" in await gym.log()


async def test_typing_replaces_the_content_of_the_field_and_presses_enter(session: Session) -> None:
    gym = await Gym.open(session)
    await gym.act("type", text="new", **await gym.target("field"))
    assert await session.page.locator("input").input_value() == "new"
    assert (await gym.log())[-2:] == ["Enter", "change field"]


async def test_keys_are_pressed_with_their_modifiers(session: Session) -> None:
    gym = await Gym.open(session)
    await gym.act("click" if gym.marks else "left_click", **await gym.target("field"))
    await gym.log()
    await gym.act("key", text="Control+a")
    await gym.act("key", text="Delete")
    assert await gym.log() == ["ctrl Control", "ctrl a", "Delete"]
    assert await session.page.locator("input").input_value() == ""
    with pytest.raises(ValueError, match="needs the name of a key"):
        await gym.act("key", text="Ctrl+Alles")


async def test_an_option_is_selected_by_label_or_value(session: Session) -> None:
    gym = await Gym.open(session)
    for text in ("Medium", "Small", "m"):
        assert (await gym.act("select_option", text=text, **await gym.target("size"))).error is None
    assert await session.page.locator("select").input_value() == "m"
    assert (await gym.log()).count("change size") == 3
    for text, problem in (("Huge", "there is no such option"), ("Large", "the option is disabled")):
        seen = await gym.act("select_option", text=text, **await gym.target("size"))
        assert seen.error == f'"{text}" was not selected: {problem}'
    seen = await gym.act("select_option", text="Small", **await gym.target("press"))
    assert seen.error == '"Small" was not selected: this is no list of options'


async def test_scrolling_at_an_element_scrolls_that_element(session: Session) -> None:
    gym = await Gym.open(session)
    seen = await gym.act("scroll", direction="down", **await gym.target("inner"))
    assert await session.page.evaluate("document.querySelector('[aria-label=inner]').scrollTop") > 0
    assert (seen.scroll.y if seen.scroll else None) == 0


async def test_going_back_and_navigating_are_the_same_in_both_tools(session: Session) -> None:
    gym = await Gym.open(session)
    assert (await gym.act("click" if gym.marks else "left_click", **await gym.target("plain"))).title == "Other"
    assert (await gym.act("go_back")).title == "Gym"
    assert (await gym.act("navigate", url=f"{ORIGIN}/other.html")).title == "Other"
    assert (await gym.act("wait", time=0)).title == "Other"
    assert (await gym.act("answer", text="done")).error is None


async def test_a_window_becomes_a_tab_that_can_be_switched_and_closed(session: Session) -> None:
    gym = await Gym.open(session)
    assert [(tab.title, tab.active) for tab in gym.seen.tabs] == [("Gym", True)]
    seen = await gym.act("click" if gym.marks else "left_click", **await gym.target("link"))
    assert (seen.title, seen.error) == ("Other", "a new tab was opened")
    assert [(tab.title, tab.url, tab.active) for tab in seen.tabs] == [
        ("Gym", f"{ORIGIN}/gym.html", False),
        ("Other", f"{ORIGIN}/other.html", True),
    ]
    assert (await gym.act("switch_tab", tab=1)).title == "Gym"
    assert (await gym.act("switch_tab", tab=3)).error == "there is no tab 3; 2 are open"
    seen = await gym.act("close_tab", tab=2)
    assert ([tab.title for tab in seen.tabs], seen.error) == (["Gym"], None)
    assert (await gym.act("close_tab")).error == "the only tab stays open"


async def test_tabs_are_opened_up_to_their_limit_and_only_on_allowed_places(session: Session) -> None:
    gym = await Gym.open(session)
    seen = await gym.act("new_tab", url="https://example.com")
    assert "is not one of the allowed places" in str(seen.error)
    assert len(seen.tabs) == 1
    assert (await gym.act("new_tab", url=f"{ORIGIN}/other.html")).title == "Other"
    assert (await gym.act("new_tab")).url == "about:blank"
    assert (await gym.act("new_tab")).error == "no more than 3 tabs can be open; close one first"
    await gym.act("switch_tab", tab=1)
    seen = await gym.act("click" if gym.marks else "left_click", **await gym.target("link"))
    assert seen.error == "a new window was closed; no more than 3 tabs can be open"
    assert (await gym.act("close_tab")).title == ""
    assert [tab.title for tab in gym.seen.tabs] == ["Other", ""]


async def test_a_window_that_opens_while_titles_are_read_is_not_listed_yet(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    gym = await Gym.open(session)
    await gym.act("click" if gym.marks else "left_click", **await gym.target("link"))
    known, real = session._tabs._tabs, tabs._title

    async def opens_another(tab: Tab) -> str:
        known.append(tab)
        return await real(tab)

    monkeypatch.setattr(tabs, "_title", opens_another)
    seen = await gym.act("wait", time=0)
    known.pop()
    assert [tab.title for tab in seen.tabs] == ["Gym", "Other"]


async def test_a_tab_that_closes_itself_leaves_the_one_before(session: Session) -> None:
    gym = await Gym.open(session)
    await gym.act("click" if gym.marks else "left_click", **await gym.target("link"))
    await session.page.evaluate("setTimeout(close)")
    seen = await gym.act("wait", time=0.2)
    assert (seen.title, seen.error, len(seen.tabs)) == ("Gym", "a tab has closed itself", 1)


async def test_a_tab_that_closes_itself_on_a_click_leaves_the_one_before(session: Session) -> None:
    gym = await Gym.open(session)
    await gym.act("click" if gym.marks else "left_click", **await gym.target("link"))
    await session.page.evaluate("() => { addEventListener('keydown', () => window.close()); }")
    seen = await gym.act("key", text="Enter")
    assert (seen.title, len(seen.tabs)) == ("Gym", 1)


async def test_a_window_that_opens_after_the_observation_does_not_take_the_action(session: Session) -> None:
    gym = await Gym.open(session)
    target = await gym.target("press")
    page = session.page
    async with page.expect_popup():
        await page.evaluate("() => { open('other.html'); }")
    seen = await gym.act("click" if gym.marks else "left_click", **target)
    assert (await page.evaluate("log"))[-1] == "click press"
    assert (seen.title, len(seen.tabs)) == ("Other", 2)


async def test_an_action_that_is_not_enabled_is_refused_by_name(site: FolderSite) -> None:
    async with pool_on(site, actions=["hover"]) as pool, pool.session() as session:
        gym = await Gym.open(session)
        assert gym.seen.tabs == ()
        assert (await gym.act("drag", coordinate=(0, 0), end_coordinate=(9, 9))).error == (
            "drag is not enabled (browser.actions)"
        )
        assert (await gym.act("click", element_id=1)).error == "click is not enabled (browser.actions)"
        assert (await gym.act("hover", element_id=1)).error == (
            "element 1 is not in the observation: nothing is numbered in it"
        )
        with pytest.raises(ValueError, match="lacks what its kind needs"):
            await gym.act("hover")
