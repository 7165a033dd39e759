"""Environments solved by clicks on the elements that the instruction names."""

from __future__ import annotations

_BOXES = r"""tick((box) => asked(/^Select (.*) and click/).split(', ').includes(say(box.parentNode)))"""

_SYNONYMS = r"""tick((box) => asked(/similar to (.*) and click/).split(', ')
  .some((word) => SYNONYMS.some((words) => words.includes(word) && words.includes(say(box.parentNode)))))"""

_SECTION = """(() => {
  const link = named('.alink', quoted()), section = link.closest('.ui-accordion-content');
  return {element: section.offsetHeight ? link : section.previousElementSibling};
})()"""

_TAB = """(() => {
  const link = named('.alink', quoted()), tab = link.closest('[id^=tabs-]');
  return {element: tab.offsetHeight ? link : $(`a[href="#${tab.id}"]`)};
})()"""

# Whether a shape fits a description such as "small red letter" or "large 7".
_MEANT = """(words) => {
  const last = words.at(-1);
  return (shape) => {
    const tag = shape.tagName, corners = tag === 'polygon' ? shape.getAttribute('points').split(/[ ,]/) : [];
    const size = parseFloat(tag === 'text' ? shape.getAttribute('font-size')
      : tag === 'rect' ? shape.getAttribute('width')
      : tag === 'circle' ? 2 * shape.getAttribute('r') : corners[4] - corners[0]);
    const text = tag === 'text' ? shape.textContent : {rect: 'rectangle', circle: 'circle', polygon: 'triangle'}[tag];
    const type = tag !== 'text' ? 'shape' : /[0-9]/.test(text) ? 'digit' : 'letter';
    return ['item', text, type].includes(last) && words.slice(0, -1).every(
      (word) => word === shape.getAttribute('fill') || word === (size > 15 ? 'large' : 'small'));
  };
}"""

_SHAPE = f"""{{element: all('#area_svg > *').find(({_MEANT})(asked(/^Click on a (.*)$/).split(' ')))}}"""

_COUNT = rf"""(() => {{
  const meant = ({_MEANT})(asked(/^How many (.*)s are there/).split(' '));
  return {{element: named('#count-buttons button', String(all('#area_svg > *').filter(meant).length))}};
}})()"""

_MENU = """(() => {
  const names = asked(/^Select (.*)$/).split('>'), items = names.map((name) => named('#menu li > div', name));
  const next = items.findIndex((item, i) => i === items.length - 1 || !items[i + 1].offsetHeight);
  return {element: items[next], kind: next === items.length - 1 ? 'left_click' : 'hover'};
})()"""

_ICON_MENU = """(() => {
  const icon = $('#query .ui-icon');
  const item = icon ? $(`#menu .${[...icon.classList].find((c) => c.startsWith('ui-icon-'))}`).parentNode
    : named('#menu li > div', quoted(1));
  const above = item.closest('ul').closest('li');
  return {element: !shown('#menu') ? $('#open-menu') : item.offsetHeight ? item : above.querySelector('div')};
})()"""

_CARD = """(() => {
  const value = (card) => Number(say(card.querySelector('.card-value')));
  const best = all('.card').sort((a, b) => value(b) - value(a))[0];
  return best.classList.contains('hidden') ? {element: best} : submit();
})()"""

_TREE = """(() => {
  let item = named('#tree span', quoted()).closest('li');
  while (!item.offsetHeight) item = item.parentNode.closest('li');
  return {element: item.querySelector('span')};
})()"""

_PARITY = """(() => {
  const row = all('.row').find((r) => !r.querySelector('.selected'));
  const button = row && (say(row.querySelector('.display-number')) % 2 ? '.odd' : '.even');
  return row ? {element: row.querySelector(button)} : submit();
})()"""

_GENERATE = r"""(() => {
  const number = say($('#display-number')), limit = Number((query().match(/than (\d+)/) || [])[1]);
  const right = number !== '-' && (/less/.test(query()) ? number < limit : /greater/.test(query()) ? number > limit
    : number % 2 === (/odd/.test(query()) ? 1 : 0));
  return right ? submit() : {element: $('#generate')};
})()"""

_DATE = r"""(() => {
  const date = asked(/Select (\S+) as/), [month, day] = date.split('/').map(Number);
  if ($('#datepicker').value === date) return submit();
  if (!shown('#ui-datepicker-div')) return {element: $('#datepicker')};
  const open = new Date(`${say($('.ui-datepicker-month'))} 1, 2016`).getMonth() + 1;
  return {element: open > month ? $('.ui-datepicker-prev') : open < month ? $('.ui-datepicker-next')
    : named('#ui-datepicker-div td a', String(day))};
})()"""

# Completes a line of three, or blocks one, or takes the middle, a corner, a side.
_GAME = r"""(() => {
  const mark = (square) => squares()[square].className;
  const third = (marked) => lines.filter((line) => line.filter((square) => mark(square) === marked).length === 2)
    .map((line) => line.find((square) => !mark(square))).find((square) => square !== undefined);
  const free = [4, 0, 2, 6, 8, 1, 3, 5, 7].filter((square) => !mark(square));
  return {element: squares()[third('mark-x') ?? third('mark-o') ?? free[0]]};
})()"""

_SPINNER = r"""(() => {
  const missing = asked(/Select (-?\d+)/) - $('#spinner').value;
  return missing ? {element: $(missing > 0 ? '.ui-spinner-up' : '.ui-spinner-down')} : submit();
})()"""

# Points that clicks set are drawn 50 pixels higher, in the coordinates of the drawing.
_GEOMETRY = """(() => {
  if ($('#blue-circle')) return submit();
  const point = (selector, n = 0) => ['cx', 'cy'].map((name) => Number(all(selector)[n].getAttribute(name)));
  const minus = ([a, b], [c, d]) => [a - c, b - d];
  const unit = ([a, b]) => [a / Math.hypot(a, b), b / Math.hypot(a, b)];
  const [x, y] = (POINT)(point, minus, unit);
  return {element: $('#svg-grid'), at: [x, y + 50], within: 4};
})()"""

# The farthest of some points from `from` along either direction that is within the drawing.
_FAR = """const far = (from, ways) => ways.flatMap(([a, b]) => [60, 45, 30, 20, 12].map(
    (length) => [length, from[0] + a * length, from[1] + b * length]))
  .filter(([, x, y]) => x > 4 && x < 146 && y > 4 && y < 126).sort((a, b) => b[0] - a[0])[0].slice(1);"""

_MIDDLE = """(point) => [0, 1].map((axis) => (point('.black-circle')[axis] + point('.black-circle', 1)[axis]) / 2)"""

_BISECTOR = f"""(point, minus, unit) => {{ {_FAR}
  const corner = point('.init-blue'), [a, b] = [0, 1].map((n) => unit(minus(point('.init-black', n), corner)));
  return far(corner, [unit([a[0] + b[0], a[1] + b[1]])]);
}}"""

_RIGHT_ANGLE = f"""(point, minus, unit) => {{ {_FAR}
  const corner = point('#init-blue'), [a, b] = unit(minus(point('#init-black'), corner));
  return far(corner, [[-b, a], [b, -a]]);
}}"""

TARGET_SCRIPTS = {
    "click-test": "{element: $('#subbtn')}",
    "click-test-2": "{element: $('#subbtn')}",
    "click-test-transfer": "{element: $('#subbtn')}",
    "click-dialog": "{element: $('button.ui-button')}",
    "click-dialog-2": """{element: quoted() === 'x' ? $('.ui-dialog-titlebar-close')
      : named('.ui-dialog-buttonset button', quoted())}""",
    "click-button": r"""{element: all('#area button').find(b => b.innerHTML === query().match(/"(.*)"/)[1])}""",
    "unicode-test": "{element: named('#area button', quoted())}",
    "click-link": "{element: named('.alink', quoted())}",
    "focus-text": "{element: $('#tt')}",
    "focus-text-2": r"{element: all('#area input')[ordinal() - 1]}",
    "click-collapsible": """{element: shown('.ui-accordion-content') ? $('#subbtn') : $('#area h3')}""",
    "click-collapsible-nodelay": """{element: shown('.ui-accordion-content') ? $('#subbtn') : $('#area h3')}""",
    "click-collapsible-2": _SECTION,
    "click-collapsible-2-nodelay": _SECTION,
    "click-tab": r"""{element: all('#area ul a').find(a => query().includes(a.textContent))}""",
    "click-tab-2": _TAB,
    "click-tab-2-easy": _TAB,
    "click-tab-2-medium": """{element: named('.alink', quoted()) || $('a[href="#tabs-2"]')}""",
    "click-tab-2-hard": _TAB,
    "click-color": r"""{element: $(`#area [data-color="${core.getUtterance().match(/the (\S+) colored/)[1]}"]`)}""",
    "click-shades": r"""(() => {
      const colour = asked(/shades of (\S+) and/);
      const wrong = all('#area span').find((s) => (s.className === 'selected') !== (s.dataset.color === colour));
      return {element: wrong || $('#submit')};
    })()""",
    "click-shape": _SHAPE,
    "click-widget": '{element: $(`#area [data-type="${quoted()}"]`)}',
    "click-option": r"""tick((box) => asked(/^Select (.*) and click/) === say(box.parentNode))""",
    "click-checkboxes": _BOXES,
    "click-checkboxes-large": _BOXES,
    "click-checkboxes-transfer": _BOXES,
    "click-checkboxes-soft": _SYNONYMS,
    "click-button-sequence": "{element: buttonsPushed.length ? $('#subbtn2') : $('#subbtn')}",
    "click-menu": _MENU,
    "click-menu-2": _ICON_MENU,
    "count-shape": _COUNT,
    "identify-shape": r"""(() => {
      const shape = $('#area_svg > *'), tag = shape.tagName;
      const type = {rect: 'rectangle', circle: 'circle', polygon: 'triangle'}[tag]
        || (/[0-9]/.test(say(shape)) ? 'digit' : 'letter');
      return {element: $(`#area-buttons [data-type=${type}]`)};
    })()""",
    "number-checkboxes": r"""(() => {
      const wanted = PATTERNS[Number(quoted())].flat();
      const wrong = all('#checkboxes input').find((box, i) => box.checked !== (wanted[i] === 1));
      return wrong ? {element: wrong} : submit();
    })()""",
    "odd-or-even": _PARITY,
    "generate-number": _GENERATE,
    "find-greatest": _CARD,
    "ascending-numbers": "{element: $('#area_svg rect') || named('#area_svg text', '1')}",
    "navigate-tree": _TREE,
    "choose-date": _DATE,
    "choose-date-easy": _DATE,
    "choose-date-medium": _DATE,
    "choose-date-nodelay": _DATE,
    "use-spinner": _SPINNER,
    "tic-tac-toe": _GAME,
    "grid-coordinate": "{element: document.getElementById($('#query .bold').textContent)}",
    "circle-center": """$('#blue-circle') ? submit()
      : {element: $('#svg-grid'), at: middle($('.black-circle')), within: 4}""",
    "find-midpoint": _GEOMETRY.replace("POINT", _MIDDLE),
    "bisect-angle": _GEOMETRY.replace("POINT", _BISECTOR),
    "right-angle": _GEOMETRY.replace("POINT", _RIGHT_ANGLE),
}
