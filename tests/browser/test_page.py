"""Numbered elements of a page, and every action by their numbers or by coordinates."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from megatron_webrl.browser import chromium
from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.page.observer import pixels_differ
from megatron_webrl.browser.server.protocol import decode_observation, encode_observation
from megatron_webrl.browser.session import Session
from megatron_webrl.types import OPTIONAL_ACTION_KINDS, Action, Element, Observation
from tests.browser.conftest import ORIGIN, FolderSite, page_task, pool_on, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

FRAME_ORIGIN = "http://frame.test"
_BUTTON = """<title>{0}</title><body style="margin:0"><button style="margin:10px">{0}</button>
  <script>addEventListener("click", (e) => top.postMessage(e.target.textContent, "*"));</script>"""

PAGES = {
    "kinds": """<title>Kinds</title><style>body { margin: 4px; font: 12px sans-serif; }</style>
      <button disabled>Save</button> <a href=kinds.html>Home</a> <input aria-label=Search value=shoes autofocus>
      <input type=checkbox aria-label=Terms checked> <input type=checkbox aria-label=News>
      <input type=password aria-label=Secret value=abc required><br>
      <select aria-label=Size><option>S<option selected>M</select> <textarea aria-label=Text>two
      words</textarea> <details><summary>More</summary>hidden</details>
      <div id=plain style="width:60px">Clickable</div> <span>Only text</span> <div tabindex=0>Focusable</div>
      <script>document.getElementById("plain").addEventListener("click", () => {});
        document.body.addEventListener("click", () => {});</script>""",
    "inside": f"""<title>Inside</title><style>body {{ margin: 0; }} iframe {{ position: absolute; border: 3px solid; }}
        div {{ position: absolute; }}</style>
      <iframe src=same.html style="left:10px;top:10px;width:150px;height:60px"></iframe>
      <iframe src="{FRAME_ORIGIN}/cross.html" style="left:200px;top:10px;width:150px;height:85px;padding:5px"></iframe>
      <div id=open style="left:10px;top:120px"></div><div id=closed style="left:200px;top:120px"></div>
      <script>
        window.heard = [];
        addEventListener("message", (event) => heard.push(event.data));
        for (const mode of ["open", "closed"]) {{
          const root = document.getElementById(mode).attachShadow({{mode}});
          root.innerHTML = `<button>${{mode}} shadow</button>`;
          root.firstChild.addEventListener("click", () => heard.push(`${{mode}} shadow`));
        }}
      </script>""",
    "same": _BUTTON.format("same origin"),
    "cross": _BUTTON.format("other site")
    + f'<iframe src="{ORIGIN}/nested.html" style="position:absolute;left:5px;top:40px;width:120px;height:40px">',
    "nested": _BUTTON.format("nested"),
    "hidden": """<title>Hidden</title><style>button { position: absolute; width: 80px; height: 30px; }</style>
      <button style="left:10px;top:10px">seen</button>
      <button style="left:110px;top:10px">covered</button>
      <button style="left:210px;top:10px;visibility:hidden">invisible</button>
      <button style="left:10px;top:900px">below</button>
      <button style="left:310px;top:10px;display:none">none</button>
      <button style="left:110px;top:60px;height:60px">half</button>
      <div style="position:absolute;left:100px;top:0;width:100px;height:50px;background:white"></div>
      <div style="position:absolute;left:100px;top:90px;width:100px;height:50px;background:white"></div>""",
    "changing": """<title>Changing</title><body style="margin:0"><button id=b style="position:absolute">target</button>
      <script>window.hits = 0; b.onclick = () => { hits++; };</script>""",
    "halves": """<title>Halves</title><button id=b>b</button><input id=i><select><option id=o>o</select>
      <script>const half = "x\\ud83d"; document.title = b.textContent = i.value = o.textContent = half;</script>""",
    "many": "<title>Many</title>" + "".join(f"<button>b{number}</button> " for number in range(60)),
    "card": """<title>Card</title><div id=card style="width:150px;height:100px">card <a href=card.html>inner</a></div>
      <script>card.onclick = () => {};</script>""",
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


class FramedSite(FolderSite):
    """Has a second site, whose frames have a renderer of their own: the browser isolates sites."""

    @property
    def origins(self) -> frozenset[str]:
        return super().origins | {FRAME_ORIGIN}

    @property
    def addresses(self) -> dict[str, str]:
        return super().addresses | {"frame.test": self.server.address}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FramedSite]:
    with serving(FramedSite, tmp_path_factory.mktemp("marks"), PAGES) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(site: FramedSite) -> AsyncIterator[BrowserPool]:
    with (
        mock.patch("megatron_webrl.browser.page.observer.MAX_MARKS", 20),
        mock.patch("megatron_webrl.browser.chromium._ARGUMENTS", (*chromium._ARGUMENTS, "--site-per-process")),
        mock.patch("megatron_webrl.browser.session.MAX_TABS", 3),
    ):
        async with pool_on(site, 2, marks=True, actions=list(OPTIONAL_ACTION_KINDS)) as pool:
            yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def session(shared: Session) -> AsyncIterator[Session]:
    """One session for all tests, because opening one takes as long as most tests."""
    yield shared
    for page in shared.page.context.pages[1:]:
        await page.close()


@pytest_asyncio.fixture(loop_scope="module")
async def gym(session: Session) -> Gym:
    return await Gym.open(session)


def named(seen: Observation) -> dict[str, Element]:
    assert seen.elements is not None
    return {element.name: element for element in seen.elements}


def click(seen: Observation, name: str) -> Action:
    return Action("click", element_id=named(seen)[name].id)


async def test_elements_have_role_name_value_and_states(session: Session) -> None:
    seen = await session.reset(page_task("kinds"))
    assert seen.elements is not None
    assert [element.id for element in seen.elements] == list(range(1, len(seen.elements) + 1))
    found = {element.name: (element.role, element.value, element.states) for element in seen.elements}
    assert found == {
        "Save": ("button", "", ("disabled",)),
        "Home": ("link", "", ()),
        "Search": ("textbox", "shoes", ("focused",)),
        "Terms": ("checkbox", "", ("checked",)),
        "News": ("checkbox", "", ("not checked",)),
        "Secret": ("textbox", "•••", ("required",)),
        "Size": ("combobox", "M", ("collapsed",)),
        "Text": ("textbox", "two words", ()),
        "More": ("disclosuretriangle", "", ("collapsed",)),
        "Clickable": ("clickable", "", ()),
        "Focusable": ("clickable", "", ()),
    }
    assert named(seen)["Size"].options == ("S", "M")


async def test_halves_of_characters_in_texts_of_a_page_become_question_marks(session: Session) -> None:
    """A lone surrogate cannot be encoded, so that the observation would not reach the agent."""
    seen = await session.reset(page_task("halves"))
    assert seen.title == "x?"
    assert seen.elements is not None
    assert [(each.name, each.value, each.options) for each in seen.elements] == [
        ("x?", "", ()), ("", "x?", ()), ("x?", "x?", ("x?",))
    ]  # fmt: skip
    assert decode_observation(encode_observation(seen)) == seen


async def test_frames_and_shadow_roots_are_seen_and_hit(session: Session) -> None:
    seen = await session.reset(page_task("inside"))
    names = ["same origin", "other site", "nested", "open shadow", "closed shadow"]
    assert set(named(seen)) == set(names)
    assert named(seen)["other site"].box[:2] == (200 + 3 + 5 + 10, 10 + 3 + 5 + 10)
    assert named(seen)["nested"].box[:2] == (200 + 3 + 5 + 5 + 2 + 10, 10 + 3 + 5 + 40 + 2 + 10)
    for name in names:
        seen = await session.step(click(seen, name))
        assert seen.error is None
    await session.page.wait_for_function("heard.length == 5", timeout=5000)
    assert await session.page.evaluate("heard.sort()") == sorted(names)


async def test_only_what_is_in_view_and_not_covered_is_numbered(session: Session) -> None:
    seen = await session.reset(page_task("hidden"))
    assert set(named(seen)) == {"seen", "half"}
    below = await session.step(Action("scroll", direction="down"))
    assert "below" not in named(below)
    below = await session.step(Action("scroll", direction="down"))
    below = await session.step(Action("scroll", direction="down"))
    assert set(named(below)) == {"below"}


async def test_a_missing_element_is_reported_and_nothing_is_clicked(session: Session) -> None:
    seen = await session.reset(page_task("changing"))
    action = click(seen, "target")
    await session.page.evaluate("b.outerHTML = '<button onclick=hits++>imposter</button>'")
    after = await session.step(action)
    assert (after.error, set(named(after))) == ("element 1 is gone", {"imposter"})
    assert await session.page.evaluate("hits") == 0
    for origin in (FRAME_ORIGIN, ORIGIN):  # another site has another renderer, whose nodes have the same numbers
        await session.page.goto(f"{origin}/changing.html")
        assert (await session.step(action)).error == "element 1 is gone"
        action = click(await session.step(Action("wait", time=0)), "target")
    assert (await session.step(Action("click", element_id=99))).error == "element 99 is not in the observation"
    assert await session.page.evaluate("hits") == 0


async def test_a_moved_element_is_hit_and_a_covered_one_is_not(session: Session) -> None:
    seen = await session.reset(page_task("changing"))
    await session.page.evaluate("b.style.left = '200px'")
    seen = await session.step(click(seen, "target"))
    assert (seen.error, await session.page.evaluate("hits")) == (None, 1)
    await session.page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<div style=\"position:fixed;inset:0\"></div>')"
    )
    seen = await session.step(click(seen, "target"))
    assert (seen.error, seen.elements) == ("element 1 is hidden or covered", ())
    assert await session.page.evaluate("hits") == 1


async def test_elements_are_limited_in_number_and_containers_of_others_are_left_out(session: Session) -> None:
    assert list(named(await session.reset(page_task("many")))) == [f"b{number}" for number in range(20)]
    assert list(named(await session.reset(page_task("card")))) == ["inner"]


async def test_numbers_are_drawn_on_the_screenshot_and_not_in_the_page(session: Session) -> None:
    seen = await session.reset(page_task("changing"))
    x, y, width, height = named(seen)["target"].box
    marked = np.asarray(Image.open(io.BytesIO(seen.screenshot)).convert("RGB"))
    bare = np.asarray(Image.open(io.BytesIO(await session.page.screenshot())).convert("RGB"))
    different = (marked != bare).any(axis=2)
    assert different[y : y + height, x].all()
    assert different[y, x : x + width].all()
    assert not different[y + height + 20 :, :].any()
    assert await session.page.evaluate("document.documentElement.outerHTML.includes('webrl')") is False
    seen = await session.step(Action("wait", time=0))
    assert not seen.page_changed


async def test_screenshots_differ_by_pixels_and_not_by_bytes() -> None:
    image = Image.linear_gradient("L").resize((64, 48)).convert("RGB")
    changed = image.copy()
    changed.paste((255, 0, 0), (60, 44, 64, 48))

    def encoded(image: Image.Image, **options: Any) -> bytes:
        image.save(buffer := io.BytesIO(), "JPEG", quality=80, **options)
        return buffer.getvalue()

    assert not pixels_differ(encoded(image, progressive=True), encoded(image))
    assert pixels_differ(encoded(image), encoded(changed))
    assert pixels_differ(*(encoded(Image.new("RGB", size)) for size in ((64, 48), (48, 64))))


class Gym:
    """The page with its latest observation; addresses elements by number, or else by coordinate."""

    def __init__(self, session: Session, seen: Observation) -> None:
        self.session, self.seen = session, seen
        self.by_number = True

    @classmethod
    async def open(cls, session: Session) -> Gym:
        return cls(session, await session.reset(page_task("gym")))

    async def target(self, name: str, end: bool = False) -> dict[str, Any]:
        assert self.seen.elements is not None
        [element] = [element for element in self.seen.elements if element.name == name]
        if self.by_number:
            return {"end_element_id" if end else "element_id": element.id}
        x, y, width, height = element.box
        middle = round(1000 * (x + width / 2) / 400), round(1000 * (y + height / 2) / 300)
        return {"end_coordinate" if end else "coordinate": middle}

    async def act(self, kind: str, name: str = "", **arguments: Any) -> Observation:
        """Act, on the element of a name if there is one."""
        if name:
            arguments |= await self.target(name)
        self.seen = await self.session.step(Action(kind, **arguments))  # type: ignore[arg-type]
        return self.seen

    async def click(self, name: str) -> Observation:
        return await self.act("click" if self.by_number else "left_click", name)

    async def log(self) -> list[str]:
        return await self.session.page.evaluate("log.splice(0)")


async def test_the_mouse_clicks_hovers_drags_and_scrolls_at_an_element(gym: Gym) -> None:
    for gym.by_number in (True, False):
        await gym.click("press")
        assert (await gym.log())[-1] == "click press"
        for kind, event in (("double_click", "dblclick"), ("right_click", "contextmenu")):
            await gym.act(kind, "press")
            assert (await gym.log())[-1] == f"{event} press"
        await gym.act("hover", "thing")
        log = await gym.log()
        assert (log[-1], "click thing" in log) == ("mouseover thing", False)
        await gym.act("drag", "thing", **await gym.target("zone", end=True))
        assert "drop zone" in await gym.log()
        seen = await gym.act("scroll", "inner", direction="down")
        inner = "document.querySelector('[aria-label=inner]')"
        assert await gym.session.page.evaluate(f"{inner}.scrollTop") > 0
        assert (seen.scroll.y if seen.scroll else None) == 0
        await gym.session.page.evaluate(f"{inner}.scrollTop = 0")


async def test_text_replaces_the_content_of_a_field_and_keys_are_pressed_with_their_modifiers(gym: Gym) -> None:
    for gym.by_number in (True, False):
        await gym.act("type", "field", text=f"new {gym.by_number}")
        assert await gym.session.page.locator("input").input_value() == f"new {gym.by_number}"
        assert (await gym.log())[-2:] == ["Enter", "change field"]
    await gym.act("type", "field", text="")
    assert await gym.session.page.locator("input").input_value() == ""
    await gym.act("type", "field", text="more")
    await gym.click("field")
    await gym.log()
    await gym.act("key", text="Control+a")
    await gym.act("key", text="Delete")
    assert await gym.log() == ["ctrl Control", "ctrl a", "Delete"]
    assert await gym.session.page.locator("input").input_value() == ""
    with pytest.raises(ValueError, match="needs the name of a key"):
        await gym.act("key", text="Ctrl+Alles")


async def test_an_option_is_selected_by_label_or_value(gym: Gym) -> None:
    for gym.by_number in (True, False):
        for text in ("Medium", "Small", "m"):
            assert (await gym.act("select_option", "size", text=text)).error is None
        assert await gym.session.page.locator("select").input_value() == "m"
        assert (await gym.log()).count("change size") == 3
        for name, text, problem in (
            ("size", "Huge", "there is no such option"), ("size", "Large", "the option is disabled"),
            ("press", "Small", "this is no list of options"),
        ):  # fmt: skip
            seen = await gym.act("select_option", name, text=text)
            assert seen.error == f'"{text}" was not selected: {problem}'
        await gym.act("select_option", "size", text="Small")
        await gym.log()


async def test_a_window_becomes_a_tab_that_can_be_switched_and_closed(gym: Gym) -> None:
    assert [(tab.title, tab.active) for tab in gym.seen.tabs] == [("Gym", True)]
    seen = await gym.click("link")
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


async def test_tabs_are_opened_up_to_their_limit_and_only_on_allowed_places(gym: Gym) -> None:
    seen = await gym.act("new_tab", url="https://example.com")
    assert "is not one of the allowed places" in str(seen.error)
    assert len(seen.tabs) == 1
    assert (await gym.act("new_tab", url=f"{ORIGIN}/other.html")).title == "Other"
    assert (await gym.act("new_tab")).url == "about:blank"
    assert (await gym.act("new_tab")).error == "no more than 3 tabs can be open; close one first"
    await gym.act("switch_tab", tab=1)
    assert (await gym.click("link")).error == "a new window was closed; no more than 3 tabs can be open"
    assert (await gym.act("close_tab")).title == ""
    assert [tab.title for tab in gym.seen.tabs] == ["Other", ""]
    await gym.session.page.evaluate("() => { for (let n = 0; n < 6; n++) open('other.html'); }")
    assert len((await gym.act("wait", time=0)).tabs) == 3


async def test_a_tab_that_closes_itself_leaves_the_one_before(gym: Gym) -> None:
    await gym.click("link")
    await gym.session.page.evaluate("setTimeout(close)")
    seen = await gym.act("wait", time=0.2)
    assert (seen.title, seen.error, len(seen.tabs)) == ("Gym", "a tab has closed itself", 1)
    await gym.click("link")
    await gym.session.page.evaluate("() => { addEventListener('keydown', () => window.close()); }")
    seen = await gym.act("key", text="Enter")
    assert (seen.title, len(seen.tabs)) == ("Gym", 1)


async def test_a_window_that_opens_after_the_observation_does_not_take_the_action(gym: Gym) -> None:
    page = gym.session.page
    async with page.expect_popup():
        await page.evaluate("() => { open('other.html'); }")
    seen = await gym.click("press")
    assert (await page.evaluate("log"))[-1] == "click press"
    assert (seen.title, len(seen.tabs)) == ("Other", 2)


async def test_an_action_that_is_not_enabled_is_refused(pool: BrowserPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_settings", replace(pool._settings, marks=False, actions=["hover"]))
    async with pool.session() as session:
        gym = await Gym.open(session)
        assert gym.seen.tabs == ()
        for action, error in (
            (Action("drag", coordinate=(0, 0), end_coordinate=(9, 9)), "drag is not enabled (browser.actions)"),
            (Action("click", element_id=1), "click is not enabled (browser.actions)"),
            (Action("hover", element_id=1), "element 1 is not in the observation: nothing is numbered in it"),
        ):
            assert (await session.step(action)).error == error
        with pytest.raises(ValueError, match="lacks what its kind needs"):
            await gym.act("hover")
