"""Failing policies of MiniWoB++ environments: expressions as for `resolve_target`, until the page ends the episode."""

from __future__ import annotations

from megatron_webrl.tasks.scripted_policies import supported_environments

CANNOT_FAIL = {
    "click-test", "click-dialog", "focus-text", "click-collapsible", "click-collapsible-nodelay", "guess-number",
}  # fmt: skip
"""Environments whose pages cannot end in failure."""

_CONTRARY = r"""(() => {
  const names = asked(/^Select (.*) and click/).split(', ');
  const right = all('#area input').find((box) => box.checked === names.includes(say(box.parentNode)));
  return right ? {element: right} : submit();
})()"""

_WRONG_SYNONYM = r"""(() => {
  const words = asked(/similar to (.*) and click/).split(', ');
  const meant = (text) => SYNONYMS.some((group) => group.includes(text) && words.some((word) => group.includes(word)));
  const right = all('#area input').find((box) => box.checked === meant(say(box.parentNode)));
  return right ? {element: right} : submit();
})()"""

_OTHER_LINK = """{element: all('.alink').find((e) => e.offsetHeight && e.textContent !== quoted())
  || all('#area h3').find((e) => !e.classList.contains('ui-state-active'))}"""

_OTHER_TAB = """{element: all('.alink').find((e) => e.offsetHeight && e.textContent !== quoted())
  || all('#area ul a').at(-1)}"""

# Sends an empty answer, or acts on another mail.
_WRONG_MAIL = r"""(() => {
  const fields = core.currentFields, last = $('#send-reply') || $('#send-forward');
  const task = fields ? fields.task : /trash/.test(query()) ? 'delete' : /star/.test(query()) ? 'star'
    : /forward/.test(query()) ? 'forward' : 'reply';
  const by = fields ? fields.by : asked(/email by (\S+) and/);
  const other = all('#main .email-thread').find((e) => say(e.querySelector('.email-sender')) !== by);
  if (last) return {element: last};
  if (shown('#email')) return into($(task === 'reply' ? '.email-reply' : '.email-forward'));
  return into(other.querySelector({delete: '.trash', star: '.star'}[task] || '.email-left'));
})()"""

_WRONG_ITEM = """{by: [0, 25], slack: 3,
  element: all('#sortable li').find((item) => say(item) !== asked(/^Drag (\\S+) /))}"""

_WRONG_BUTTON = """{element: all('#area button').find((b) => b.innerHTML !== quoted())}"""

# Leaves every line of three open, its own and the opponent's.
_LOST_GAME = r"""(() => {
  const marks = squares().map((square) => square.className), free = marks.flatMap((mark, i) => mark ? [] : [i]);
  const closes = (i) => lines.some((line) => line.includes(i)
    && ['mark-x', 'mark-o'].some((mark) => line.filter((other) => marks[other] === mark).length === 2));
  return {element: squares()[free.find((i) => !closes(i)) ?? free[0]]};
})()"""

_SPECIAL = {
    "click-test-2": "{element: $('#subbtn2')}",
    "click-test-transfer": "{element: $('#subbtn2')}",
    "click-button-sequence": "{element: $('#subbtn2')}",
    "click-dialog-2": """{element: quoted() === 'OK' ? $('.ui-dialog-titlebar-close')
      : named('.ui-dialog-buttonset button', 'OK')}""",
    "click-button": _WRONG_BUTTON,
    "unicode-test": _WRONG_BUTTON,
    "click-link": _OTHER_LINK,
    "focus-text-2": "{element: all('#area input')[ordinal() % 3]}",
    "click-collapsible-2": _OTHER_LINK,
    "click-collapsible-2-nodelay": _OTHER_LINK,
    "click-tab": "{element: all('#area ul a').find((a) => !query().includes(a.textContent))}",
    "click-tab-2": _OTHER_TAB,
    "click-tab-2-easy": _OTHER_TAB,
    "click-tab-2-hard": _OTHER_TAB,
    "click-tab-2-medium": """{element: named('.alink', quoted()) ? $('a[href="#tabs-2"]') : $('.alink')}""",
    "click-color": """{element: all('#area [data-color]').find((e) => !query().includes(e.dataset.color))}""",
    "click-shape": "{element: $('#area_svg'), at: [158, 190]}",
    "click-widget": "{element: all('#area [data-type]').find((e) => e.dataset.type !== quoted())}",
    "click-checkboxes": _CONTRARY,
    "click-checkboxes-large": _CONTRARY,
    "click-checkboxes-transfer": _CONTRARY,
    "click-checkboxes-soft": _WRONG_SYNONYM,
    "click-menu": "{element: all('#menu > li > div').find((e) => !query().endsWith(say(e)))}",
    "click-menu-2": """{element: shown('#menu') ? named('#menu li > div', /Save/.test(query())
      || $('#query .ui-icon-disk') ? 'Zoom In' : 'Save') : $('#open-menu')}""",
    "count-shape": "{element: $('#area_svg'), at: [158, 165]}",
    "identify-shape": r"""{element: $(`#area-buttons [data-type=${
      $('#area_svg').firstChild.tagName === 'circle' ? 'rectangle' : 'circle'}]`)}""",
    "ascending-numbers": "{element: named('#area_svg text', '2')}",
    "navigate-tree": """{element: all('#tree .file').find((e) => e.offsetHeight && say(e) !== quoted())
      || all('#tree .expandable > .folder').find((e) => e.offsetHeight && say(e) !== quoted())}""",
    "grid-coordinate": """{element: $('#query .bold').textContent === '(0,0)' ? document.getElementById('(1,1)')
      : document.getElementById('(0,0)')}""",
    "multi-layouts": "{element: $('#area button, #area .final, #area .ui-submit')}",
    "multi-orderings": "{element: $('#area .final')}",
    "form-sequence-3": "{element: $('#buttons button')}",
    "sign-agreement": """!/^Click the cancel/.test(query()) ? {element: $('#cancel')}
      : !$('#agree').disabled ? {element: $('#agree')}
      : {element: $('#text-area'), kind: 'scroll', direction: 'down'}""",
    **dict.fromkeys([name for name in supported_environments() if name.startswith("email-inbox")], _WRONG_MAIL),
    "social-media": """{element: all('.media').find((post) => !query().includes(
      say(post.querySelector('.username')))).querySelector('.reply')}""",
    "social-media-all": "into($('#submitRow button'))",
    "social-media-some": "into($('#submitRow button'))",
    "search-engine": "{element: $('#page-content a') || $('#search')}",
    "phone-book": r"""{element: say($('#contact .name')) === asked(/^Find (.*) in the contact/)
      ? named('#pagination a', '>') : $('#contact a')}""",
    "tic-tac-toe": _LOST_GAME,
    "drag-items": _WRONG_ITEM,
    "drag-items-grid": _WRONG_ITEM,
}

MISTAKES = {name: _SPECIAL.get(name, "submit()") for name in supported_environments() if name not in CANNOT_FAIL}
"""The default: submit the form without changes."""
