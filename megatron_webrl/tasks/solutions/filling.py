"""Environments solved by typing into fields and by the arrow keys of a slider."""

from __future__ import annotations

_TABLE = """(() => {
  const value = (key) => say(all('#tab tr').find((row) => say(row.cells[0]) === key).cells[1]);
  return fill(FIELDS);
})()"""

_MOVIES = """(() => {
  const [genre, name, year] = all('#query b').map(say);
  const wanted = (row) => /genre/i.test(row) ? genre : /director/i.test(row) ? name : year;
  return fill(all('#area input').map((e) => [e, wanted(e.closest('p, .row, tr, .field, .ui-entry').textContent)]),
    {element: $('#area button, #area .final, #area .ui-submit')});
})()"""

# A click moves the handle near the value; arrow keys move it to the exact value.
_SLIDE = """const slide = (slider, wanted) => {
  const [value, low, high] = [jQuery(slider).slider('value'),
    ...['min', 'max'].map((name) => jQuery(slider).slider('option', name))];
  if (value === wanted) return null;
  if (slider.contains(document.activeElement) && Math.abs(value - wanted) <= 12) {
    return {key: value < wanted ? 'ArrowRight' : 'ArrowLeft'};
  }
  const box = slider.getBoundingClientRect(), share = (wanted - low) / (high - low), [x, y] = middle(slider);
  const upright = jQuery(slider).slider('option', 'orientation') === 'vertical';
  return {element: slider, at: upright ? [x, box.bottom - share * box.height] : [box.left + share * box.width, y]};
};"""

_AUTOCOMPLETE = """(() => {
  const [start, end] = [quoted(), query().includes('ends with') ? quoted(1) : ''];
  const item = ITEMS.find((name) => name.startsWith(start) && name.endsWith(end));
  return shown('.ui-autocomplete') ? {element: named('.ui-autocomplete li', item)} : fill([[$('#tags'), item]]);
})()"""

# The only information is the page's response to the last guess.
_GUESS = """(() => {
  const last = Number($('#tt').value), guess = shown('#higher') ? last + 1 : shown('#lower') ? last - 1 : 5;
  return {element: $('#tt'), text: String(guess)};
})()"""

_CHOICE_AND_BUTTON = """(() => {
  const option = asked(/^Choose (.*) from the/);
  return {element: $('#dropdown').value === option ? named('#buttons button', quoted())
    : shown('.selectric-items') ? named('.selectric-items li', option) : $('.selectric')};
})()"""

# A click at the start of the field selects the month, or the hour.
_AT_START = """const write = (field, text) => {
  const box = field.getBoundingClientRect();
  return {element: field, text, at: [box.left + 6, box.top + box.height / 2], within: 5};
};"""

TARGET_SCRIPTS = {
    "enter-text": "fill([[$('#tt'), $('#query .bold').textContent]])",
    "enter-text-2": """fill([[$('#tt'),
      /all upper/.test(query()) ? quoted().toUpperCase() : quoted().toLowerCase()]])""",
    "enter-text-dynamic": "fill([[$('#tt'), quoted()]])",
    "enter-password": "fill([[$('#password'), quoted()], [$('#verify'), quoted()]])",
    "enter-date": rf"""(() => {{ {_AT_START}
      const [month, day, year] = asked(/Enter (\S+) as/).split('/');
      return $('#tt').value === `${{year}}-${{month}}-${{day}}` ? submit() : write($('#tt'), month + day + year);
    }})()""",
    "enter-time": rf"""(() => {{ {_AT_START}
      const [, hour, minute, half] = query().match(/Enter (\d+):(\d+)\s(.M)/);
      const of24 = String(hour % 12 + (half === 'PM' ? 12 : 0)).padStart(2, '0');
      return $('#tt').value === `${{of24}}:${{minute}}` ? submit()
        : write($('#tt'), hour.padStart(2, '0') + minute + half);
    }})()""",
    "login-user": "fill([[$('#username'), quoted()], [$('#password'), quoted(1)]])",
    "login-user-popup": """$('#popup-cancel') ? {element: $('#popup-cancel')}
      : fill([[$('#username'), quoted()], [$('#password'), quoted(1)]])""",
    "multi-layouts": _MOVIES,
    "multi-orderings": _MOVIES,
    "text-transform": "fill([[$('#tt'), all('#captcha span').map(say).join('')]])",
    "find-word": r"""fill([[$('#answer-input'),
      say($('#area p')).split(/\s+/)[ordinal() - 1].replace(/[^a-zA-Z]/g, '')]])""",
    "copy-paste": "fill([[$('#answer-input'), $('#area textarea').value]])",
    "copy-paste-2": "fill([[$('#answer-input'), all('#area textarea')[ordinal() - 1].value]])",
    "scroll-text": r"""fill([[$('#answer-input'),
      $('#text-area').value.trim().split(/\s/).at(-1).replace(/\W/g, '')]])""",
    "scroll-text-2": """(() => {
      const text = $('#text-area'), down = / bottom /.test(query());
      const left = down ? text.scrollHeight - text.offsetHeight - text.scrollTop : text.scrollTop;
      return left < 8 ? submit() : {element: text, kind: 'scroll', direction: down ? 'down' : 'up'};
    })()""",
    "sign-agreement": """/^Click the cancel/.test(query()) ? {element: $('#cancel')}
      : $('#name').disabled ? {element: $('#text-area'), kind: 'scroll', direction: 'down'}
      : fill([[$('#name'), quoted()]], {element: $(quoted(1) === 'Agree' ? '#agree' : '#cancel')})""",
    "read-table": _TABLE.replace("FIELDS", "[[$('#tt'), value(say($('#query .bold')))]]"),
    "read-table-2": _TABLE.replace(
        "FIELDS", "[1, 2].map((n) => [$(`#tt${n}`), value(say($(`#ll${n}`)).slice(0, -1))])"
    ),
    "simple-arithmetic": r"""(() => {
      const [, a, sign, b] = say($('#math-problem')).match(/(\d+) (.) (\d+)/);
      return fill([[$('#math-answer'), String(sign === '+' ? +a + +b : sign === '-' ? a - b : a * b)]]);
    })()""",
    "simple-algebra": r"""(() => {
      const [, a, sign, b, result] = say($('#math-problem')).match(/(\S+) (.) (\S+) = (\d+)/);
      const x = sign === '+' ? result - (a === 'x' ? b : a) : a === 'x' ? +result + +b : a - result;
      return fill([[$('#math-answer'), String(x)]]);
    })()""",
    "visual-addition": "fill([[$('#math-answer'), String(all('.addition-block').length)]])",
    "guess-number": _GUESS,
    "use-autocomplete": _AUTOCOMPLETE,
    "use-autocomplete-nodelay": _AUTOCOMPLETE,
    "choose-list": r"""(() => {
      const list = $('#options'), text = asked(/^Select (.*) from the list/);
      return list.value === text ? submit() : {element: list, kind: 'select_option', text};
    })()""",
    "form-sequence": rf"""(() => {{ {_SLIDE}
      const box = all('#area input')[Number(query().match(/(\d)(st|nd|rd)/)[1]) - 1];
      return slide($('#slider'), Number(asked(/^Select (-?\d+)/))) || (box.checked ? submit() : {{element: box}});
    }})()""",
    "form-sequence-2": r"""(() => {
      const [radio, field] = [...query().matchAll(/(\d)(st|nd|rd)/g)].map((match) => Number(match[1]));
      const button = $(`#area input[value="${radio}"]`);
      return button.checked ? fill([[$(`#input-${field}`), quoted()]]) : {element: button};
    })()""",
    "form-sequence-3": _CHOICE_AND_BUTTON,
    "use-slider": rf"""(() => {{ {_SLIDE}
      return slide($('#slider'), Number(asked(/^Select (-?\d+)/))) || submit();
    }})()""",
    "use-slider-2": rf"""(() => {{ {_SLIDE}
      return asked(/\[(.*)\]/).split(',').map((value, i) => slide($(`#slider-${{i + 1}}`), Number(value)))
        .find((step) => step) || submit();
    }})()""",
}
