"""Scripted policies of MiniWoB++ environments, which read the page's elements instead of its pixels.

Each is a JavaScript expression over the page's state that names the next action, as `resolve_target` takes it.
"""

from __future__ import annotations

from playwright.async_api import Page

from megatron_webrl.tasks.click_target import ScriptedPolicyError, resolve_target
from megatron_webrl.tasks.solutions import browsing, clicking, dragging, filling
from megatron_webrl.types import Action, ActionKind

_TARGETS = clicking.TARGET_SCRIPTS | filling.TARGET_SCRIPTS | browsing.TARGET_SCRIPTS | dragging.TARGET_SCRIPTS

_FURTHER_ACTIONS: dict[str, tuple[ActionKind, ...]] = {
    **dict.fromkeys(dragging.TARGET_SCRIPTS, ("drag",)),
    **dict.fromkeys(["form-sequence", "use-slider", "use-slider-2"], ("key",)),
    **dict.fromkeys(
        ["email-inbox", "email-inbox-nl-turk", "email-inbox-noscroll", "email-inbox-reply", "email-inbox-star-reply"],
        ("key",),
    ),
    "choose-list": ("select_option",),
    "click-menu": ("hover",),
}

# What a step submits prematurely where that is not the Submit button: the second button without the first, a square
# without a look at the game; behind an open calendar there is nothing to submit.
_PREMATURE_TARGETS = {
    "click-button-sequence": "{element: $('#subbtn2')}",
    "tic-tac-toe": "{element: any(squares().filter((square) => !square.className))}",
    **dict.fromkeys(
        ["choose-date", "choose-date-easy", "choose-date-medium", "choose-date-nodelay"],
        "shown('#ui-datepicker-div') ? {} : submit()",
    ),
}

# Helpers of the expressions: parts of the instruction, tic-tac-toe's squares and lines of three, common steps on forms.
_WITH_HELPERS = r"""(() => {
  const say = (e) => e.textContent.trim();
  const named = (selector, text) => all(selector).find((e) => say(e) === text);
  const asked = (pattern) => query().match(pattern)[1];
  const quoted = (n = 0) => [...query().matchAll(/"([^"]*)"/g)][n][1];
  const ordinal = () => Number(asked(/(\d+)(?:st|nd|rd|th)/));
  const any = (elements) => elements[Math.floor(Math.random() * elements.length)];
  const squares = () => all('.ttt-row span');
  const lines = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]];
  const submit = () => ({element: $('#subbtn, #submit, #area button.secondary-action')});
  const fill = (fields, last = submit()) => {
    const next = fields.find(([field, text]) => field.value !== text);
    return next ? {element: next[0], text: next[1]} : last;
  };
  const tick = (wanted) => {
    const wrong = all('#area input').find((box) => box.checked !== wanted(box));
    return wrong ? {element: wrong} : submit();
  };
  const into = (element) => {
    let view = element.parentNode;
    while (view !== document.body && getComputedStyle(view).overflowY !== 'scroll') view = view.parentNode;
    const [, y] = middle(element), box = view.getBoundingClientRect();
    return view === document.body || (y >= box.top && y <= box.bottom) ? {element}
      : {element: view, kind: 'scroll', direction: y < box.top ? 'up' : 'down'};
  };
  return TARGET;
})()"""


def supported_environments() -> tuple[str, ...]:
    return tuple(_TARGETS)


def required_actions(environment: str) -> tuple[ActionKind, ...]:
    return _FURTHER_ACTIONS.get(environment, ())


async def next_scripted_action(page: Page, environment: str, premature_submit: bool = False) -> Action:
    """The next action that solves the environment; `premature_submit`: what ends the episode, if the page has that.

    A premature step of tic-tac-toe takes any free square. Raises ScriptedPolicyError, and KeyError without a script.
    """
    target = _TARGETS[environment]
    if premature_submit:
        premature = _PREMATURE_TARGETS.get(environment, "submit()")
        target = f"((premature) => premature.element?.offsetHeight ? premature : {target})({premature})"
    try:
        return await resolve_target_with_helpers(page, target)
    except ScriptedPolicyError as error:
        raise ScriptedPolicyError(f"{environment}: {error}") from error


async def resolve_target_with_helpers(page: Page, target: str) -> Action:
    return await resolve_target(page, _WITH_HELPERS.replace("TARGET", target))
