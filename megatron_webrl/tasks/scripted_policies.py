"""Scripts that solve MiniWoB++ environments; they are in `scripted_policies.js`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_webrl.tasks import remember_sign
from megatron_webrl.tasks.click_target import ScriptedPolicyError, resolve_target
from megatron_webrl.types import Action, ActionKind

if TYPE_CHECKING:
    from playwright.async_api import Page

_SCRIPT = Path(__file__).with_suffix(".js").read_text()
_NAMES = tuple(
    re.findall(r'^    "([a-z0-9-]+)": ', _SCRIPT.partition("const policies")[2].partition("};\n\n")[0], re.M)
)
_SCRIPTS = {name: name for name in _NAMES if name != remember_sign.SCRIPT}
_SCRIPTS |= dict.fromkeys(remember_sign.ENVIRONMENTS, remember_sign.SCRIPT)
"""Name of the script of each environment."""

_FURTHER_ACTIONS: dict[str, tuple[ActionKind, ...]] = {
    **dict.fromkeys([name for name in _NAMES if name.startswith("drag-")], ("drag",)),
    "highlight-text": ("drag",),
    **dict.fromkeys(["form-sequence", "use-slider", "use-slider-2"], ("key",)),
    **dict.fromkeys(
        ["email-inbox", "email-inbox-nl-turk", "email-inbox-noscroll", "email-inbox-reply", "email-inbox-star-reply"],
        ("key",),
    ),
    "choose-list": ("select_option",),
    "click-menu": ("hover",),
}


def supported_environments() -> tuple[str, ...]:
    return tuple(_SCRIPTS)


def required_actions(environment: str) -> tuple[ActionKind, ...]:
    return _FURTHER_ACTIONS.get(environment, ())


async def next_scripted_action(page: Page, environment: str, premature_submit: bool = False) -> Action:
    """The next action that solves the environment; `premature_submit`: what ends the episode, if the page has that.

    A premature step of tic-tac-toe takes any free square, one of remember-sign-* notes any sign, one
    of match-sign-* presses a wrong one. Raises ScriptedPolicyError, and KeyError without a script.
    """
    script = _SCRIPTS[environment]
    target = f"premature('{script}')" if premature_submit else f"policies['{script}']()"
    try:
        return await resolve_target_with_helpers(page, target)
    except ScriptedPolicyError as error:
        raise ScriptedPolicyError(f"{environment}: {error}") from error


async def resolve_target_with_helpers(page: Page, target: str) -> Action:
    """Like `resolve_target`, of an expression over the helpers of the scripts."""
    return await resolve_target(page, _SCRIPT.replace("TARGET", target))
