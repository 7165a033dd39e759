// The rollouts of a running job, live: totals, a stacked history, and a cell for each rollout.
//
// The cells are drawn on a canvas of the window's size inside a scrolling box, so that thousands cost as much as those in
// sight. For the keyboard and readers of text the box is a list whose active option is the chosen cell.
import { foreign, getJson, h, number, visible } from "./dom.js";

export const GLYPHS = {
  "waiting for browser": "B", navigating: "N", observing: "O", "waiting for model": "M", acting: "A", judging: "J",
  "waiting for step": "S", success: "✓", failure: "✗", masked: "–",
};
const GROUPINGS = { none: "Nothing", worker: "Worker", group: "Group", task: "Task", site: "Site", state: "State" };
const CELL = 24, GAP = 4, HEAD = 22, PAD = 6, BLOCK = 180; // pixels; BLOCK: least width of a group
const HISTORY_SECONDS = 600, REFRESH = 500; // REFRESH: milliseconds between two requests

export const stateName = (row) => (row.state === "masked" ? `masked: ${visible(row.reason)}` : ["success", "failure"].includes(row.state) ? `finished: ${row.state}` : row.state);

// What is known of all rollouts, asked for twice a second.
class Rollouts {
  constructor(onChange) {
    this.rows = new Map();
    this.history = [];
    this.states = Object.keys(GLYPHS);
    this.error = "";
    this.received = null; // time of the server, and ours when it came
    this.onChange = onChange;
    this.closed = false;
    this.refresh();
  }

  async refresh() {
    try {
      this.take(await getJson(`/api/rollouts?after=${this.history[this.history.length - 1]?.[0] ?? 0}`));
    } catch (error) {
      this.error = error instanceof TypeError ? "the server does not answer; trying again" : error.message;
      if (!this.closed) this.onChange(false);
    }
    if (!this.closed) this.timer = setTimeout(() => this.refresh(), REFRESH);
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
  }

  take(answer) {
    if (this.closed) return;
    const before = this.rows, first = !this.received;
    this.states = answer.states;
    this.rows = new Map(answer.rows.map(([worker, ...values]) => {
      const found = Object.fromEntries(answer.fields.map((name, place) => [name, values[place]])), id = `${worker}/${found.key}`;
      const words = `${worker} ${found.kind} ${found.ticket} ${found.task} ${found.site} ${found.difficulty}`.toLowerCase();
      // The wall keeps the objects of the rows that it shows.
      return [id, Object.assign(before.get(id) ?? {}, found, { id, worker, words, place: found.state, state: this.states[found.state] })];
    }));
    this.error = answer.error;
    this.received = [answer.time, performance.now()];
    this.history.push(...answer.history);
    while (this.history.length && this.history[0][0] < answer.time - HISTORY_SECONDS) this.history.shift();
    this.onChange(first || before.size !== this.rows.size || [...this.rows.keys()].some((id) => !before.has(id)));
  }

  counts(rows) {
    const found = this.states.map(() => 0);
    for (const row of rows) found[row.place] += 1;
    return found;
  }

  seconds(row) {
    const [time, at] = this.received;
    return Math.max(0, time + (performance.now() - at) / 1000 - row.since);
  }
}

export async function rolloutsPage(_, query) {
  const chosen = { group: query.get("by") ?? "worker", words: query.get("text") ?? "", states: new Set(query.getAll("state")) };
  const remember = () => {
    const next = new URLSearchParams();
    if (chosen.group !== "worker") next.set("by", chosen.group);
    if (chosen.words) next.set("text", chosen.words);
    chosen.states.forEach((each) => next.append("state", each));
    history.replaceState(null, "", `#/rollouts${next.size ? `?${next}` : ""}`);
  };
  const summary = h("p", { role: "status" }, "Waiting for the job."), legend = h("div", { class: "states", role: "group", "aria-label": "States; choose those to show" });
  const past = h("canvas", { class: "past", role: "img", "aria-label": "Rollouts by state over the last minutes" });
  const detail = h("p", { class: "detail" }, "Choose a cell to see its rollout.");
  const wall = new Wall((row) => { location.hash = `#/rollout/${encodeURIComponent(row.worker)}/${encodeURIComponent(row.key)}`; }, () => showDetail());
  const words = h("input", { type: "search", value: chosen.words, "aria-label": "Words in worker, ticket, task, site or difficulty", oninput: () => { chosen.words = words.value.trim(); arrange(); } });
  const grouping = h("select", { onchange: () => { chosen.group = grouping.value; arrange(); } },
    Object.entries(GROUPINGS).map(([value, label]) => h("option", { value, selected: value === chosen.group }, label)));

  const all = new Rollouts((structure) => {
    if (structure || chosen.states.size || chosen.group === "state" || all.error) arrange(false);
    else wall.draw();
    showTotals();
    drawPast(past, all);
    showDetail();
  });
  const buttons = new Map();

  function arrange(changed = true) {
    if (changed) remember();
    const parts = chosen.words.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = [...all.rows.values()].filter((row) => (!chosen.states.size || chosen.states.has(row.state)) && parts.every((each) => row.words.includes(each)));
    wall.arrange(shown, chosen.group, all.states);
    showTotals();
  }

  function showTotals() {
    const workers = new Set([...all.rows.values()].map((row) => row.worker)).size;
    const text = all.error ? `No rollouts: ${all.error}.` : all.rows.size ? `${number(wall.shown)} of ${number(all.rows.size)} rollouts shown, of ${number(workers)} worker${workers === 1 ? "" : "s"}`
      : all.received ? "No rollout runs." : "Waiting for the job.";
    if (summary.textContent !== text) summary.textContent = text;
    const counts = all.counts(all.rows.values());
    all.states.forEach((state, place) => {
      if (!buttons.has(state)) {
        const count = h("span", { class: "count" });
        const button = h("button", { type: "button", "aria-pressed": String(chosen.states.has(state)), onclick: () => {
          if (!chosen.states.delete(state)) chosen.states.add(state);
          button.setAttribute("aria-pressed", String(chosen.states.has(state)));
          arrange();
        } }, h("span", { class: `swatch state-${place}`, "aria-hidden": "true" }, GLYPHS[state]), stateName({ state, reason: "any reason" }), count);
        buttons.set(state, count);
        legend.append(button);
      }
      buttons.get(state).textContent = number(counts[place]);
    });
  }

  function showDetail() {
    const row = all.rows.get(wall.pointed ?? wall.active);
    if (!row) { detail.replaceChildren("Choose a cell to see its rollout."); return; }
    const limit = `step ${number(row.step)} of ${number(row.limit)}`, version = row.version === null ? "no version so far" : `version ${number(row.version)}`;
    detail.replaceChildren(h("strong", {}, stateName(row)), ` for ${number(all.seconds(row), 2)} s, ${limit}, ${version}. `, foreign(row.task),
      " on ", foreign(row.site), `, ${row.difficulty}. ${visible(row.worker)}, ${row.kind} ticket ${row.ticket}, episode ${row.index + 1} of ${row.group_size}${row.tries > 1 ? `, try ${row.tries}` : ""}.`);
  }

  const clock = setInterval(showDetail, 1000);
  const redraw = () => { wall.draw(); drawPast(past, all); };
  const themes = new MutationObserver(redraw), sizes = new ResizeObserver(() => { wall.measure(); redraw(); });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  themes.observe(document.documentElement, { attributes: true });
  dark.addEventListener("change", redraw);
  sizes.observe(wall.element);
  showTotals();
  const element = h("section", {}, h("h1", {}, "Rollouts"), summary, legend, past,
    h("div", { class: "links choices" }, h("label", {}, "Group by ", grouping), h("label", {}, "Words ", words)), wall.element, detail);
  return { element, leave: () => { all.close(); clearInterval(clock); themes.disconnect(); sizes.disconnect(); dark.removeEventListener("change", redraw); } };
}

// The cells, in groups, and which of them is active.
class Wall {
  constructor(open, onPoint) {
    this.active = null; // number of the chosen rollout
    this.pointed = null; // of that under the pointer
    this.cells = []; // {row, x, y}, in order
    this.heads = []; // {text, y}
    this.rows = [];
    this.option = h("div", { id: "active-rollout", role: "option", class: "unseen", "aria-selected": "true" }, "no rollout");
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.space = h("div", { class: "space", role: "presentation" }, this.canvas, this.option);
    this.element = h("div", {
      class: "wall", tabindex: 0, role: "listbox", "aria-label": "Rollouts", "aria-activedescendant": "active-rollout",
      onscroll: () => this.draw(), onkeydown: (event) => this.key(event, open),
      onpointermove: (event) => { this.pointed = this.at(event)?.row.id ?? null; this.draw(); onPoint(); },
      onpointerleave: () => { this.pointed = null; this.draw(); onPoint(); },
      onclick: (event) => { const cell = this.at(event); if (cell) open(cell.row); },
      onfocus: () => { if (this.place() < 0 && this.cells.length) this.choose(0); },
    });
    this.element.append(this.space);
    this.onPoint = onPoint;
    this.waiting = false;
  }

  get shown() { return this.cells.length; }

  measure() {
    this.layOut();
  }

  arrange(rows, by, states) {
    const name = { worker: (row) => row.worker, group: (row) => `${row.kind} ticket ${row.ticket}`, task: (row) => row.task, site: (row) => row.site, state: (row) => stateName(row) }[by];
    const order = (row) => (by === "state" ? states.indexOf(row.state) : 0);
    const natural = (one, other) => (one < other ? -1 : one > other ? 1 : 0);
    const length = (text) => String(text).length;
    this.groups = new Map();
    rows.sort((one, other) => order(one) - order(other) || length(one.worker) - length(other.worker) || natural(one.worker, other.worker) || natural(one.kind, other.kind) || one.ticket - other.ticket || one.index - other.index);
    for (const row of rows) {
      const head = name ? name(row) : "";
      if (!this.groups.has(head)) this.groups.set(head, []);
      this.groups.get(head).push(row);
    }
    this.layOut();
  }

  // Places of all cells, for the width of the box: groups side by side where several fit into a line.
  layOut() {
    const width = (this.element.clientWidth || 300) - 2 * PAD, step = CELL + GAP;
    const groups = [...(this.groups ?? [])], largest = Math.max(0, ...groups.map(([, rows]) => rows.length));
    const block = Math.min(width, Math.max(BLOCK, largest * step + 2 * GAP)), beside = Math.max(1, Math.floor(width / block));
    const columns = Math.max(1, Math.floor((beside > 1 ? block : width + GAP) / step));
    this.cells = [];
    this.heads = [];
    let y = PAD, line = 0; // top and height of a line of groups
    groups.forEach(([head, rows], place) => {
      const left = PAD + (place % beside) * block, below = y + (head ? HEAD : 0);
      if (head) this.heads.push({ text: `${visible(head)} (${rows.length})`, x: left, y, room: beside > 1 ? block - 2 * GAP : width });
      rows.forEach((row, each) => this.cells.push({ row, x: left + (each % columns) * step, y: below + Math.floor(each / columns) * step }));
      line = Math.max(line, below - y + Math.ceil(rows.length / columns) * step + (head ? GAP : 0));
      if (place % beside === beside - 1 || place === groups.length - 1) [y, line] = [y + line, 0];
    });
    this.cells.sort((one, other) => one.y - other.y || one.x - other.x);
    this.space.style.setProperty("height", `${Math.max(y, 60)}px`);
    this.draw();
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.paint(); });
  }

  paint() {
    const { clientWidth: width, clientHeight: height, scrollTop: top } = this.element, ratio = devicePixelRatio || 1;
    if (!width) return;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
      this.canvas.style.setProperty("width", `${width}px`);
      this.canvas.style.setProperty("height", `${height}px`);
    }
    const pen = this.canvas.getContext("2d"), colours = palette();
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.textBaseline = "middle";
    pen.font = "13px system-ui, sans-serif";
    pen.fillStyle = colours.text;
    for (const head of this.heads) {
      if (head.y + HEAD > top && head.y < top + height) pen.fillText(fitted(pen, head.text, head.room), head.x, head.y - top + HEAD / 2);
    }
    pen.textAlign = "center";
    pen.font = "600 14px system-ui, sans-serif";
    for (let place = this.firstBelow(top - CELL); place < this.cells.length; place += 1) {
      const { row, x, y: under } = this.cells[place], y = under - top;
      if (y > height) break;
      pen.fillStyle = colours.states[row.place];
      pen.fillRect(x, y, CELL, CELL);
      pen.fillStyle = colours.on;
      pen.fillText(GLYPHS[row.state] ?? "?", x + CELL / 2, y + CELL / 2 - 1);
      pen.fillRect(x + 2, y + CELL - 4, (CELL - 4) * Math.min(1, row.step / Math.max(1, row.limit)), 2);
      if (row.id === this.active || row.id === this.pointed) {
        pen.strokeStyle = colours.text;
        pen.lineWidth = 2;
        pen.strokeRect(x - 2, y - 2, CELL + 4, CELL + 4);
      }
    }
    pen.textAlign = "left";
  }

  // Number of the first cell that is not above a height.
  firstBelow(y) {
    let low = 0, high = this.cells.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.cells[middle].y < y) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top + this.element.scrollTop;
    for (let place = this.firstBelow(y - CELL); place < this.cells.length && this.cells[place].y <= y; place += 1) {
      const cell = this.cells[place];
      if (x >= cell.x && x <= cell.x + CELL && y <= cell.y + CELL) return cell;
    }
    return null;
  }

  place() {
    return this.cells.findIndex((cell) => cell.row.id === this.active);
  }

  choose(place) {
    const cell = this.cells[place], { row } = cell;
    this.active = row.id;
    this.option.textContent = `${stateName(row)}, step ${row.step} of ${row.limit}, ${visible(row.task)}, ${visible(row.worker)}, ticket ${row.ticket}, episode ${row.index + 1}`;
    const { scrollTop: top, clientHeight: height } = this.element;
    if (cell.y - HEAD < top) this.element.scrollTop = Math.max(0, cell.y - HEAD - PAD);
    else if (cell.y + CELL + PAD > top + height) this.element.scrollTop = cell.y + CELL + PAD - height;
    this.draw();
    this.onPoint();
  }

  key(event, open) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.cells.length) return;
    const now = Math.max(0, this.place()), last = this.cells.length - 1;
    const moves = {
      ArrowRight: () => Math.min(last, now + 1), ArrowLeft: () => Math.max(0, now - 1), Home: () => 0, End: () => last,
      ArrowDown: () => this.beside(now, 1), ArrowUp: () => this.beside(now, -1),
      PageDown: () => this.beside(now, 1, this.element.clientHeight), PageUp: () => this.beside(now, -1, this.element.clientHeight),
    };
    if (event.key === "Enter" && this.place() >= 0) open(this.cells[now].row);
    else if (moves[event.key]) this.choose(moves[event.key]());
    else return;
    event.preventDefault();
  }

  // The cell above or below another: in the nearest line that is at least `distance` away, the nearest one.
  beside(now, direction, distance = 1) {
    const from = this.cells[now];
    const others = this.cells.map((cell, place) => ({ place, down: direction * (cell.y - from.y), across: Math.abs(cell.x - from.x) })).filter((each) => each.down > 0);
    if (!others.length) return now;
    const furthest = Math.max(...others.map((each) => each.down));
    const line = Math.min(...others.filter((each) => each.down >= Math.min(distance, furthest)).map((each) => each.down));
    return others.filter((each) => each.down === line).sort((one, other) => one.across - other.across)[0].place;
  }
}

// A text without what does not fit into a width.
function fitted(pen, text, width) {
  const length = Math.floor(text.length * width / Math.max(1, pen.measureText(text).width));
  return length >= text.length ? text : `${text.slice(0, Math.max(0, length - 1))}…`;
}

// Colours of the theme that is in use.
function palette() {
  const probe = palette.probe ??= Object.keys(GLYPHS).map((_, place) => h("span", { class: `swatch state-${place}` }));
  const host = palette.host ??= h("div", { class: "unseen", "aria-hidden": "true" }, probe);
  if (!host.isConnected) document.body.append(host);
  const key = `${document.documentElement.dataset.theme} ${matchMedia("(prefers-color-scheme: dark)").matches}`;
  if (palette.key !== key) {
    palette.key = key;
    palette.found = {
      states: probe.map((each) => getComputedStyle(each).backgroundColor), on: getComputedStyle(probe[0]).color, text: getComputedStyle(document.body).color,
    };
  }
  return palette.found;
}

// Rollouts by state over time, stacked.
function drawPast(canvas, all) {
  const width = canvas.clientWidth, height = canvas.clientHeight, ratio = devicePixelRatio || 1;
  if (!width || !all.received) return;
  Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  const pen = canvas.getContext("2d"), colours = palette(), now = all.received[0];
  const most = Math.max(1, ...all.history.map(([, ...counts]) => counts.reduce((sum, each) => sum + each, 0)));
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const span = Math.min(HISTORY_SECONDS, Math.max(60, now - (all.history[0]?.[0] ?? now)));
  const points = all.history.map(([time, ...counts]) => ({ x: Math.round(width - ((now - time) / span) * width), counts }));
  points.forEach(({ x, counts }, place) => {
    const next = points[place + 1]?.x ?? width;
    if (next - x > (10 / span) * width) return; // nobody looked
    let y = height;
    counts.forEach((count, state) => {
      const tall = (count / most) * (height - 16);
      pen.fillStyle = colours.states[state];
      pen.fillRect(x, y - tall, Math.max(1, next - x), tall);
      y -= tall;
    });
  });
  pen.fillStyle = colours.text;
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(`up to ${number(most)} rollouts, the last ${span < 120 ? `${Math.round(span)} s` : `${Math.round(span / 60)} minutes`}`, 2, 10);
}
