// Scripts that solve MiniWoB++ environments: each names the next action, as resolve_target of click_target.py takes it,
// by the page's elements instead of its pixels. `scripted_policies.py` reads their names here.
(() => {
  // Parts of the instruction, tic-tac-toe's squares and lines of three, common steps on forms.
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

  // Whether a shape fits a description such as "small red letter" or "large 7".
  const fits = (words) => {
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
  };
  const boxes = () => tick((box) => asked(/^Select (.*) and click/).split(', ').includes(say(box.parentNode)));
  const synonyms = () => tick((box) => asked(/similar to (.*) and click/).split(', ')
    .some((word) => SYNONYMS.some((words) => words.includes(word) && words.includes(say(box.parentNode)))));
  const section = () => {
    const link = named('.alink', quoted()), section = link.closest('.ui-accordion-content');
    return {element: section.offsetHeight ? link : section.previousElementSibling};
  };
  const tab = () => {
    const link = named('.alink', quoted()), tab = link.closest('[id^=tabs-]');
    return {element: tab.offsetHeight ? link : $(`a[href="#${tab.id}"]`)};
  };
  const date = () => {
    const date = asked(/Select (\S+) as/), [month, day] = date.split('/').map(Number);
    if ($('#datepicker').value === date) return submit();
    if (!shown('#ui-datepicker-div')) return {element: $('#datepicker')};
    const open = new Date(`${say($('.ui-datepicker-month'))} 1, 2016`).getMonth() + 1;
    return {element: open > month ? $('.ui-datepicker-prev') : open < month ? $('.ui-datepicker-next')
      : named('#ui-datepicker-div td a', String(day))};
  };
  const onward = () => {
    const shape = $('#area svg > *'), way = asked(/(left|right|up|down) then/);
    const [x, y] = {left: [-1, 0], right: [1, 0], up: [0, -1], down: [0, 1]}[way];
    const [start, place] = [shape.getBBox(), shapes.gridCoords(shape)];
    const moved = x * (place.x - start.x) + y * (place.y - start.y) > 0;
    return moved ? submit() : {element: shape, by: [25 * x, 25 * y], slack: 2};
  };
  const remember = (sign) => {
    if ($('#area input')) return {element: $('#area input'), text: `a ${episode.sign}`, note: episode.sign};
    const button = (sign) => all('#area button').find((button) => button.dataset.sign === sign);
    if (options.has('match')) return {element: button(sign), note: episode.sign};
    const note = episode.note ||= sign;
    return {element: button(note) || $('.next'), note};
  };
  const movies = () => {
    const [genre, name, year] = all('#query b').map(say);
    const wanted = (row) => /genre/i.test(row) ? genre : /director/i.test(row) ? name : year;
    return fill(all('#area input').map((e) => [e, wanted(e.closest('p, .row, tr, .field, .ui-entry').textContent)]),
      {element: $('#area button, #area .final, #area .ui-submit')});
  };
  const autocomplete = () => {
    const [start, end] = [quoted(), query().includes('ends with') ? quoted(1) : ''];
    const item = ITEMS.find((name) => name.startsWith(start) && name.endsWith(end));
    return shown('.ui-autocomplete') ? {element: named('.ui-autocomplete li', item)} : fill([[$('#tags'), item]]);
  };
  // The farthest of some points from `from` along either direction that is within the drawing.
  const far = (from, ways) => ways.flatMap(([a, b]) => [60, 45, 30, 20, 12].map(
      (length) => [length, from[0] + a * length, from[1] + b * length]))
    .filter(([, x, y]) => x > 4 && x < 146 && y > 4 && y < 126).sort((a, b) => b[0] - a[0])[0].slice(1);
  // Points that clicks set are drawn 50 pixels higher, in the coordinates of the drawing.
  const geometry = (find) => () => {
    if ($('#blue-circle')) return submit();
    const point = (selector, n = 0) => ['cx', 'cy'].map((name) => Number(all(selector)[n].getAttribute(name)));
    const minus = ([a, b], [c, d]) => [a - c, b - d];
    const unit = ([a, b]) => [a / Math.hypot(a, b), b / Math.hypot(a, b)];
    const [x, y] = find(point, minus, unit);
    return {element: $('#svg-grid'), at: [x, y + 50], within: 4};
  };
  // Typing ends with Enter, which adds an extra line to a reply.
  const mail = ({task, by, to, message}) => {
    const [reply, field] = [$('#reply-text'), $('.forward-sender')];
    if (reply) {
      return reply.value === message + '\n' ? {key: 'Backspace'}
        : fill([[reply, message]], {element: $('#send-reply')});
    }
    if (field) return fill([[field, to]], {element: $('#send-forward')});
    if (shown('#email')) return into($(task === 'reply' ? '.email-reply' : '.email-forward'));
    const thread = all('#main .email-thread').find((e) => say(e.querySelector('.email-sender')) === by);
    return into(thread.querySelector({delete: '.trash', star: '.star'}[task] || '.email-left'));
  };
  const mailFromQuery = () => mail({
    task: /trash/.test(query()) ? 'delete' : /star/.test(query()) ? 'star'
      : /forward/.test(query()) ? 'forward' : 'reply',
    by: asked(/email by (\S+) and/), to: (query().match(/ to (\S+)\.$/) || [])[1],
    message: (query().match(/"(.*)"/) || [])[1],
  });
  const mailFromFields = () => mail(core.currentFields);
  const posts = (amount) => () => {
    const label = say(all('#query .bold')[0]), user = say(all('#query .bold').at(-1));
    const kind = Object.keys(ACTIONS).find((name) => ACTIONS[name] === label);
    const buttons = all('.media').filter((post) => say(post.querySelector('.username')) === user)
      .map((post) => post.querySelector(`.${kind}`));
    const pressed = buttons.filter((button) => button.classList.contains('active')).length;
    return pressed < amount(buttons) ? into(buttons.find((button) => !button.classList.contains('active')))
      : into($('#submitRow button'));
  };
  // Drag one list item to the place of another and slightly beyond it, so that the other item moves away.
  const move = (from, to) => {
    const [a, b] = [middle(from), middle(to)];
    return {element: from, by: [0, 1].map((axis) => b[axis] - a[axis] + 4 * Math.sign(Math.round(b[axis] - a[axis]))),
            slack: 2};
  };
  // A click moves the handle near the value; arrow keys move it to the exact value.
  const slide = (slider, wanted) => {
    const [value, low, high] = [jQuery(slider).slider('value'),
      ...['min', 'max'].map((name) => jQuery(slider).slider('option', name))];
    if (value === wanted) return null;
    if (slider.contains(document.activeElement) && Math.abs(value - wanted) <= 12) {
      return {key: value < wanted ? 'ArrowRight' : 'ArrowLeft'};
    }
    const box = slider.getBoundingClientRect(), share = (wanted - low) / (high - low), [x, y] = middle(slider);
    const upright = jQuery(slider).slider('option', 'orientation') === 'vertical';
    return {element: slider, at: upright ? [x, box.bottom - share * box.height] : [box.left + share * box.width, y]};
  };
  // A click at the start of the field selects the month, or the hour.
  const write = (field, text) => {
    const box = field.getBoundingClientRect();
    return {element: field, text, at: [box.left + 6, box.top + box.height / 2], within: 5};
  };
  const cell = (key) => say(all('#tab tr').find((row) => say(row.cells[0]) === key).cells[1]);

  const policies = {
    "click-test": () => ({element: $('#subbtn')}),
    "click-test-2": () => ({element: $('#subbtn')}),
    "click-test-transfer": () => ({element: $('#subbtn')}),
    "click-dialog": () => ({element: $('button.ui-button')}),
    "click-dialog-2": () => ({element: quoted() === 'x' ? $('.ui-dialog-titlebar-close')
      : named('.ui-dialog-buttonset button', quoted())}),
    "click-button": () => ({element: all('#area button').find(b => b.innerHTML === query().match(/"(.*)"/)[1])}),
    "unicode-test": () => ({element: named('#area button', quoted())}),
    "click-link": () => ({element: named('.alink', quoted())}),
    "focus-text": () => ({element: $('#tt')}),
    "focus-text-2": () => ({element: all('#area input')[ordinal() - 1]}),
    "click-collapsible": () => ({element: shown('.ui-accordion-content') ? $('#subbtn') : $('#area h3')}),
    "click-collapsible-nodelay": () => ({element: shown('.ui-accordion-content') ? $('#subbtn') : $('#area h3')}),
    "click-collapsible-2": section,
    "click-collapsible-2-nodelay": section,
    "click-tab": () => ({element: all('#area ul a').find(a => query().includes(a.textContent))}),
    "click-tab-2": tab,
    "click-tab-2-easy": tab,
    "click-tab-2-medium": () => ({element: named('.alink', quoted()) || $('a[href="#tabs-2"]')}),
    "click-tab-2-hard": tab,
    "click-color": () => ({element: $(`#area [data-color="${core.getUtterance().match(/the (\S+) colored/)[1]}"]`)}),
    "click-shades": () => {
      const colour = asked(/shades of (\S+) and/);
      const wrong = all('#area span').find((s) => (s.className === 'selected') !== (s.dataset.color === colour));
      return {element: wrong || $('#submit')};
    },
    "click-shape": () => ({element: all('#area_svg > *').find(fits(asked(/^Click on a (.*)$/).split(' ')))}),
    "click-widget": () => ({element: $(`#area [data-type="${quoted()}"]`)}),
    "click-option": () => tick((box) => asked(/^Select (.*) and click/) === say(box.parentNode)),
    "click-checkboxes": boxes,
    "click-checkboxes-large": boxes,
    "click-checkboxes-transfer": boxes,
    "click-checkboxes-soft": synonyms,
    "click-button-sequence": () => ({element: buttonsPushed.length ? $('#subbtn2') : $('#subbtn')}),
    "click-menu": () => {
      const names = asked(/^Select (.*)$/).split('>'), items = names.map((name) => named('#menu li > div', name));
      const next = items.findIndex((item, i) => i === items.length - 1 || !items[i + 1].offsetHeight);
      return {element: items[next], kind: next === items.length - 1 ? 'left_click' : 'hover'};
    },
    "click-menu-2": () => {
      const icon = $('#query .ui-icon');
      const item = icon ? $(`#menu .${[...icon.classList].find((c) => c.startsWith('ui-icon-'))}`).parentNode
        : named('#menu li > div', quoted(1));
      const above = item.closest('ul').closest('li');
      return {element: !shown('#menu') ? $('#open-menu') : item.offsetHeight ? item : above.querySelector('div')};
    },
    "count-shape": () => {
      const meant = fits(asked(/^How many (.*)s are there/).split(' '));
      return {element: named('#count-buttons button', String(all('#area_svg > *').filter(meant).length))};
    },
    "identify-shape": () => {
      const shape = $('#area_svg > *'), tag = shape.tagName;
      const type = {rect: 'rectangle', circle: 'circle', polygon: 'triangle'}[tag]
        || (/[0-9]/.test(say(shape)) ? 'digit' : 'letter');
      return {element: $(`#area-buttons [data-type=${type}]`)};
    },
    "number-checkboxes": () => {
      const wanted = PATTERNS[Number(quoted())].flat();
      const wrong = all('#checkboxes input').find((box, i) => box.checked !== (wanted[i] === 1));
      return wrong ? {element: wrong} : submit();
    },
    "odd-or-even": () => {
      const row = all('.row').find((r) => !r.querySelector('.selected'));
      const button = row && (say(row.querySelector('.display-number')) % 2 ? '.odd' : '.even');
      return row ? {element: row.querySelector(button)} : submit();
    },
    "generate-number": () => {
      const number = say($('#display-number')), limit = Number((query().match(/than (\d+)/) || [])[1]);
      const right = number !== '-' && (/less/.test(query()) ? number < limit : /greater/.test(query()) ? number > limit
        : number % 2 === (/odd/.test(query()) ? 1 : 0));
      return right ? submit() : {element: $('#generate')};
    },
    "find-greatest": () => {
      const value = (card) => Number(say(card.querySelector('.card-value')));
      const best = all('.card').sort((a, b) => value(b) - value(a))[0];
      return best.classList.contains('hidden') ? {element: best} : submit();
    },
    "ascending-numbers": () => ({element: $('#area_svg rect') || named('#area_svg text', '1')}),
    "navigate-tree": () => {
      let item = named('#tree span', quoted()).closest('li');
      while (!item.offsetHeight) item = item.parentNode.closest('li');
      return {element: item.querySelector('span')};
    },
    "choose-date": date,
    "choose-date-easy": date,
    "choose-date-medium": date,
    "choose-date-nodelay": date,
    "use-spinner": () => {
      const missing = asked(/Select (-?\d+)/) - $('#spinner').value;
      return missing ? {element: $(missing > 0 ? '.ui-spinner-up' : '.ui-spinner-down')} : submit();
    },
    "tic-tac-toe": () => {
      const mark = (square) => squares()[square].className;
      const third = (marked) => lines.filter((line) => line.filter((square) => mark(square) === marked).length === 2)
        .map((line) => line.find((square) => !mark(square))).find((square) => square !== undefined);
      const free = [4, 0, 2, 6, 8, 1, 3, 5, 7].filter((square) => !mark(square));
      return {element: squares()[third('mark-x') ?? third('mark-o') ?? free[0]]};
    },
    "grid-coordinate": () => ({element: document.getElementById($('#query .bold').textContent)}),
    "circle-center": () => $('#blue-circle') ? submit()
      : {element: $('#svg-grid'), at: middle($('.black-circle')), within: 4},
    "find-midpoint": geometry((point) => {
      const [a, b] = [point('.black-circle'), point('.black-circle', 1)];
      return [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2];
    }),
    "bisect-angle": geometry((point, minus, unit) => {
      const corner = point('.init-blue'), [a, b] = [0, 1].map((n) => unit(minus(point('.init-black', n), corner)));
      return far(corner, [unit([a[0] + b[0], a[1] + b[1]])]);
    }),
    "right-angle": geometry((point, minus, unit) => {
      const corner = point('#init-blue'), [a, b] = unit(minus(point('#init-black'), corner));
      return far(corner, [[-b, a], [b, -a]]);
    }),

    "enter-text": () => fill([[$('#tt'), $('#query .bold').textContent]]),
    "enter-text-2": () => fill([[$('#tt'),
      /all upper/.test(query()) ? quoted().toUpperCase() : quoted().toLowerCase()]]),
    "enter-text-dynamic": () => fill([[$('#tt'), quoted()]]),
    "enter-password": () => fill([[$('#password'), quoted()], [$('#verify'), quoted()]]),
    "enter-date": () => {
      const [month, day, year] = asked(/Enter (\S+) as/).split('/');
      return $('#tt').value === `${year}-${month}-${day}` ? submit() : write($('#tt'), month + day + year);
    },
    "enter-time": () => {
      const [, hour, minute, half] = query().match(/Enter (\d+):(\d+)\s(.M)/);
      const of24 = String(hour % 12 + (half === 'PM' ? 12 : 0)).padStart(2, '0');
      return $('#tt').value === `${of24}:${minute}` ? submit()
        : write($('#tt'), hour.padStart(2, '0') + minute + half);
    },
    "login-user": () => fill([[$('#username'), quoted()], [$('#password'), quoted(1)]]),
    "login-user-popup": () => $('#popup-cancel') ? {element: $('#popup-cancel')}
      : fill([[$('#username'), quoted()], [$('#password'), quoted(1)]]),
    "multi-layouts": movies,
    "multi-orderings": movies,
    "text-transform": () => fill([[$('#tt'), all('#captcha span').map(say).join('')]]),
    "find-word": () => fill([[$('#answer-input'),
      say($('#area p')).split(/\s+/)[ordinal() - 1].replace(/[^a-zA-Z]/g, '')]]),
    "copy-paste": () => fill([[$('#answer-input'), $('#area textarea').value]]),
    "copy-paste-2": () => fill([[$('#answer-input'), all('#area textarea')[ordinal() - 1].value]]),
    "scroll-text": () => fill([[$('#answer-input'),
      $('#text-area').value.trim().split(/\s/).at(-1).replace(/\W/g, '')]]),
    "scroll-text-2": () => {
      const text = $('#text-area'), down = / bottom /.test(query());
      const left = down ? text.scrollHeight - text.offsetHeight - text.scrollTop : text.scrollTop;
      return left < 8 ? submit() : {element: text, kind: 'scroll', direction: down ? 'down' : 'up'};
    },
    "sign-agreement": () => /^Click the cancel/.test(query()) ? {element: $('#cancel')}
      : $('#name').disabled ? {element: $('#text-area'), kind: 'scroll', direction: 'down'}
      : fill([[$('#name'), quoted()]], {element: $(quoted(1) === 'Agree' ? '#agree' : '#cancel')}),
    "read-table": () => fill([[$('#tt'), cell(say($('#query .bold')))]]),
    "read-table-2": () => fill([1, 2].map((n) => [$(`#tt${n}`), cell(say($(`#ll${n}`)).slice(0, -1))])),
    "simple-arithmetic": () => {
      const [, a, sign, b] = say($('#math-problem')).match(/(\d+) (.) (\d+)/);
      return fill([[$('#math-answer'), String(sign === '+' ? +a + +b : sign === '-' ? a - b : a * b)]]);
    },
    "simple-algebra": () => {
      const [, a, sign, b, result] = say($('#math-problem')).match(/(\S+) (.) (\S+) = (\d+)/);
      const x = sign === '+' ? result - (a === 'x' ? b : a) : a === 'x' ? +result + +b : a - result;
      return fill([[$('#math-answer'), String(x)]]);
    },
    "visual-addition": () => fill([[$('#math-answer'), String(all('.addition-block').length)]]),
    "guess-number": () => {
      const last = Number($('#tt').value), guess = shown('#higher') ? last + 1 : shown('#lower') ? last - 1 : 5;
      return {element: $('#tt'), text: String(guess)};
    },
    "use-autocomplete": autocomplete,
    "use-autocomplete-nodelay": autocomplete,
    "choose-list": () => {
      const list = $('#options'), text = asked(/^Select (.*) from the list/);
      return list.value === text ? submit() : {element: list, kind: 'select_option', text};
    },
    "form-sequence": () => {
      const box = all('#area input')[Number(query().match(/(\d)(st|nd|rd)/)[1]) - 1];
      return slide($('#slider'), Number(asked(/^Select (-?\d+)/))) || (box.checked ? submit() : {element: box});
    },
    "form-sequence-2": () => {
      const [radio, field] = [...query().matchAll(/(\d)(st|nd|rd)/g)].map((match) => Number(match[1]));
      const button = $(`#area input[value="${radio}"]`);
      return button.checked ? fill([[$(`#input-${field}`), quoted()]]) : {element: button};
    },
    "form-sequence-3": () => {
      const option = asked(/^Choose (.*) from the/);
      return {element: $('#dropdown').value === option ? named('#buttons button', quoted())
        : shown('.selectric-items') ? named('.selectric-items li', option) : $('.selectric')};
    },
    "use-slider": () => slide($('#slider'), Number(asked(/^Select (-?\d+)/))) || submit(),
    "use-slider-2": () => asked(/\[(.*)\]/).split(',').map((value, i) => slide($(`#slider-${i + 1}`), Number(value)))
      .find((step) => step) || submit(),

    "email-inbox": mailFromQuery,
    "email-inbox-delete": mailFromQuery,
    "email-inbox-forward": mailFromQuery,
    "email-inbox-important": mailFromQuery,
    "email-inbox-noscroll": mailFromQuery,
    "email-inbox-reply": mailFromQuery,
    "email-inbox-star-reply": mailFromQuery,
    "email-inbox-forward-nl": mailFromFields,
    "email-inbox-forward-nl-turk": mailFromFields,
    "email-inbox-nl-turk": mailFromFields,
    "social-media": () => {
      const [user, label] = all('#query .bold').map(say);
      const kind = Object.keys(ACTIONS).find((name) => ACTIONS[name] === label);
      const post = all('.media').find((e) => say(e.querySelector('.username')) === user);
      const button = post.querySelector(`.${kind}`);
      return into(button.offsetHeight ? button : post.querySelector('.more'));
    },
    "social-media-all": posts((buttons) => buttons.length),
    "social-media-some": posts(() => Number(say(all('#query .bold')[1]))),
    "search-engine": () => {
      const place = ordinal() - 1, link = $(`#page-content a[data-result="${place}"]`);
      return fill([[$('#search-text'), quoted()]], !$('#page-content a') ? {element: $('#search')}
        : {element: link || named('#pagination a', String(Math.floor(place / 3) + 1))});
    },
    "phone-book": () => ({element: say($('#contact .name')) === asked(/^Find (.*) in the contact/)
      ? $(`#contact a.${query().match(/their (phone|email|address)/)[1]}`) : named('#pagination a', '>')}),

    "drag-box": () => {
      const [small, large] = [$('#draggableSmall'), $('#draggableLarge')], [a, b] = [middle(small), middle(large)];
      if (smallBoxContained()) return submit();
      if (document.elementFromPoint(...a) !== small) return {element: large, by: [b[0] < 80 ? 60 : -60, 0], slack: 2};
      return {element: small, by: [b[0] - a[0], b[1] - a[1]], slack: 2};
    },
    "drag-circle": onward,
    "drag-single-shape": onward,
    "drag-items": () => {
      const items = all('#sortable li'), i = items.findIndex((item) => say(item) === asked(/^Drag (\S+) /));
      const place = query().match(/the (\d)/);
      const to = place ? place[1] - 1 : /top/.test(query()) ? 0 : /bottom/.test(query()) ? items.length - 1
        : i + (/down/.test(query()) ? 1 : -1);
      return move(items[i], items[to]);
    },
    "drag-items-grid": () => {
      const items = all('#sortable li'), i = items.findIndex((item) => say(item) === asked(/^Drag (\S+) /));
      const step = query().match(/(up|down|left|right) by one/), place = (query().match(/to the (.*)\.$/) || [])[1];
      const to = step ? i + {up: -3, down: 3, left: -1, right: 1}[step[1]]
        : ['top left', 'top center', 'top right', 'center left', 'center', 'center right', 'bottom left',
           'bottom center', 'bottom right'].indexOf(place);
      return move(items[i], items[to]);
    },
    "drag-sort-numbers": () => {
      const items = all('#sortable li'), values = items.map((item) => Number(say(item)));
      const sorted = [...values].sort((a, b) => a - b), to = values.findIndex((value, i) => value !== sorted[i]);
      return to < 0 ? submit() : move(items[values.indexOf(sorted[to], to)], items[to]);
    },
    "remember-sign": () => remember(episode.sign),
    "highlight-text": () => {
      const text = $('#randomText'), plain = (string) => string.replace(/\s/g, '');
      if (plain(getSelection().toString()) === plain(text.textContent)) return submit();
      const range = document.createRange();
      range.selectNodeContents(text);
      const lines = [...range.getClientRects()], [first, last] = [lines[0], lines.at(-1)];
      const at = [first.left + 0.5, first.top + first.height / 2];
      return {element: text, at, within: 1, by: [last.right - first.left, last.top - first.top]};
    },
  };

  // What ends an episode at once where that is not the Submit button: the second button without the first, a square
  // without a look at the game, a note without a look at the sign, or a wrong sign's button; behind an open calendar
  // there is nothing to submit.
  const ofOpenCalendar = () => shown('#ui-datepicker-div') ? {} : submit();
  const endings = {
    "click-button-sequence": () => ({element: $('#subbtn2')}),
    "remember-sign": () => remember(episode.guess),
    "tic-tac-toe": () => ({element: any(squares().filter((square) => !square.className))}),
    "choose-date": ofOpenCalendar,
    "choose-date-easy": ofOpenCalendar,
    "choose-date-medium": ofOpenCalendar,
    "choose-date-nodelay": ofOpenCalendar,
  };
  const premature = (name) => {
    const ending = (endings[name] || submit)();
    return ending.element?.offsetHeight ? ending : policies[name]();
  };
  return TARGET;
})()
