"""Environments solved by dragging."""

from __future__ import annotations

# Drag one list item to the place of another and slightly beyond it, so that the other item moves away.
_MOVE = """const move = (from, to) => {
  const [a, b] = [middle(from), middle(to)];
  return {element: from, by: [0, 1].map((axis) => b[axis] - a[axis] + 4 * Math.sign(Math.round(b[axis] - a[axis]))),
          slack: 2};
};"""

_ONWARD = """(() => {
  const shape = $('#area svg > *'), way = asked(/(left|right|up|down) then/);
  const [x, y] = {left: [-1, 0], right: [1, 0], up: [0, -1], down: [0, 1]}[way];
  const [start, place] = [shape.getBBox(), shapes.gridCoords(shape)];
  const moved = x * (place.x - start.x) + y * (place.y - start.y) > 0;
  return moved ? submit() : {element: shape, by: [25 * x, 25 * y], slack: 2};
})()"""

TARGET_SCRIPTS = {
    "drag-box": """(() => {
      const [small, large] = [$('#draggableSmall'), $('#draggableLarge')], [a, b] = [middle(small), middle(large)];
      if (smallBoxContained()) return submit();
      if (document.elementFromPoint(...a) !== small) return {element: large, by: [b[0] < 80 ? 60 : -60, 0], slack: 2};
      return {element: small, by: [b[0] - a[0], b[1] - a[1]], slack: 2};
    })()""",
    "drag-circle": _ONWARD,
    "drag-single-shape": _ONWARD,
    "drag-items": rf"""(() => {{ {_MOVE}
      const items = all('#sortable li'), i = items.findIndex((item) => say(item) === asked(/^Drag (\S+) /));
      const place = query().match(/the (\d)/);
      const to = place ? place[1] - 1 : /top/.test(query()) ? 0 : /bottom/.test(query()) ? items.length - 1
        : i + (/down/.test(query()) ? 1 : -1);
      return move(items[i], items[to]);
    }})()""",
    "drag-items-grid": rf"""(() => {{ {_MOVE}
      const items = all('#sortable li'), i = items.findIndex((item) => say(item) === asked(/^Drag (\S+) /));
      const step = query().match(/(up|down|left|right) by one/), place = (query().match(/to the (.*)\.$/) || [])[1];
      const to = step ? i + {{up: -3, down: 3, left: -1, right: 1}}[step[1]]
        : ['top left', 'top center', 'top right', 'center left', 'center', 'center right', 'bottom left',
           'bottom center', 'bottom right'].indexOf(place);
      return move(items[i], items[to]);
    }})()""",
    "drag-sort-numbers": rf"""(() => {{ {_MOVE}
      const items = all('#sortable li'), values = items.map((item) => Number(say(item)));
      const sorted = [...values].sort((a, b) => a - b), to = values.findIndex((value, i) => value !== sorted[i]);
      return to < 0 ? submit() : move(items[values.indexOf(sorted[to], to)], items[to]);
    }})()""",
    "highlight-text": r"""(() => {
      const text = $('#randomText'), plain = (string) => string.replace(/\s/g, '');
      if (plain(getSelection().toString()) === plain(text.textContent)) return submit();
      const range = document.createRange();
      range.selectNodeContents(text);
      const lines = [...range.getClientRects()], [first, last] = [lines[0], lines.at(-1)];
      const at = [first.left + 0.5, first.top + first.height / 2];
      return {element: text, at, within: 1, by: [last.right - first.left, last.top - first.top]};
    })()""",
}
