"""Numbered elements: their properties, their positions, and actions on elements that are gone or covered."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator
from unittest import mock

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.server.protocol import decode_observation, encode_observation
from megatron_webrl.browser.session import Session
from megatron_webrl.types import Action, Element, Observation
from tests.browser.conftest import FolderSite, page_task, pool_on, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

FRAME_ORIGIN = "http://frame.localhost"
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
      <iframe src="{FRAME_ORIGIN}/cross.html" style="left:200px;top:10px;width:150px;height:60px;padding:5px"></iframe>
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
    "cross": _BUTTON.format("other site"),
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
}


class FramedSite(FolderSite):
    """Has a second origin, whose frames have a renderer of their own."""

    @property
    def origins(self) -> frozenset[str]:
        return super().origins | {FRAME_ORIGIN}

    @property
    def addresses(self) -> dict[str, str]:
        return super().addresses | {"frame.localhost": self.server.address}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FramedSite]:
    with serving(FramedSite, tmp_path_factory.mktemp("marks"), PAGES) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(site: FramedSite) -> AsyncIterator[BrowserPool]:
    with mock.patch("megatron_webrl.browser.page.observer.MAX_MARKS", 20):
        async with pool_on(site, marks=True) as pool:
            yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def session(pool: BrowserPool) -> AsyncIterator[Session]:
    async with pool.session() as session:
        yield session


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
    names = ["same origin", "other site", "open shadow", "closed shadow"]
    assert set(named(seen)) == set(names)
    assert named(seen)["other site"].box[:2] == (200 + 3 + 5 + 10, 10 + 3 + 5 + 10)
    for name in names:
        seen = await session.step(click(seen, name))
        assert seen.error is None
    await session.page.wait_for_function("heard.length == 4", timeout=5000)
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
    await session.page.evaluate("b.outerHTML = '<button>imposter</button>'")
    await session.page.evaluate("() => { document.querySelector('button').onclick = () => { hits++; }; }")
    after = await session.step(action)
    assert after.error == "element 1 is gone"
    assert await session.page.evaluate("hits") == 0
    assert set(named(after)) == {"imposter"}


async def test_a_number_is_invalid_on_the_next_page(session: Session) -> None:
    seen = await session.reset(page_task("changing"))
    action = click(seen, "target")
    await session.page.goto("http://site.localhost/changing.html?again")
    assert (await session.step(action)).error == "element 1 is gone"
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


async def test_elements_are_limited_in_number(session: Session) -> None:
    seen = await session.reset(page_task("many"))
    assert list(named(seen)) == [f"b{number}" for number in range(20)]


async def test_a_container_of_other_elements_is_not_numbered(session: Session) -> None:
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
