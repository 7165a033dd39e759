// Several runs in one chart each, the figures that they reach, and the settings in which they differ.
// The address holds the choice: #/compare?x=hours&curve=Success: greedy&without=NAME.
import { chart, lineKey } from "./chart.js";
import { chartsOf, gain } from "./curves.js";
import { foreign, getJson, h, number, rowsTable, visible } from "./dom.js";

const REFRESH_MS = 5000;
const FIRST_CHOICE = ["Success: sampled in training", "Success: evaluated at temperature 1", "Success: greedy", "Reward of trained episodes: mean", "Entropy, nats per token: entropy",
  "Log-probability mismatch, nats: largest", "Trained tokens per second: tokens"];
const whole = (value) => number(Math.round(value));
const AXES = {
  update: { name: "update", format: whole, add: () => 1 },
  trajectories: { name: "trained trajectories", format: whole, add: (update, _, run) => update.groups * run.group_size - (update.extra.masked_episodes ?? 0) },
  hours: { name: "hours since the first update began", format: (value) => number(value), add: (update, before) => (update.finished_at - (before?.finished_at ?? update.finished_at - began(update))) / 3600 },
};
const began = (update) => update.seconds.wait + update.seconds.train + update.seconds.sync;
const address = (name) => `/runs/${encodeURIComponent(name)}`;

export async function comparePage(_, query) {
  const { runs, settings } = await getJson("/api/runs", "");
  const chosen = { x: query.get("x") in AXES ? query.get("x") : "update", curves: query.has("curve") ? query.getAll("curve") : null, without: query.getAll("without") };
  runs.forEach((run, place) => { run.place = place; run.updates = []; });
  await load(runs);
  const figures = h("div", {}), choice = h("div", {});
  const keep = (changes) => {
    Object.assign(chosen, changes);
    const next = new URLSearchParams({ x: chosen.x });
    (chosen.curves ?? []).forEach((name) => next.append("curve", name));
    chosen.without.forEach((name) => next.append("without", name));
    history.replaceState(null, "", `#/compare?${next}`); // without navigation, so that the focus stays
    draw();
  };
  const draw = () => figures.replaceChildren(...drawn(runs, chosen));
  choice.append(...controls(runs, chosen, keep).flat());
  draw();
  const timer = setInterval(() => load(runs).then((news) => news && draw(), () => { /* the header says it */ }), REFRESH_MS);
  const element = h("div", { class: "with-side" },
    h("aside", { "aria-label": "What is compared" }, h("details", { open: innerWidth > 760 }, h("summary", {}, "Runs and curves"), choice)),
    h("section", {}, h("h1", {}, "Compare"), figures, settingsTable(runs, settings)));
  return { element, leave: () => clearInterval(timer) };
}

// Take in what the runs have gained; whether that was anything.
async function load(runs) {
  const gained = await Promise.all(runs.map(async (run) => {
    const news = await gain(run, address(run.name));
    if (news) run.charts = chartsOf(run.updates, run.evaluations);
    return news;
  }));
  return gained.some(Boolean);
}

// All curves of all runs by "title: line", in the order of the Run page.
function allCurves(runs) {
  const found = new Map();
  for (const run of runs) {
    for (const each of run.charts) {
      for (const line of each.series) found.set(`${each.title}: ${line.name}`, each);
    }
  }
  return found;
}

const chosenCurves = (all, chosen) => [...all.keys()].filter((name) => (chosen.curves ?? FIRST_CHOICE).includes(name));

function controls(runs, chosen, keep) {
  const all = allCurves(runs);
  const toggled = (list, value, wanted) => (wanted ? [...list, value] : list.filter((each) => each !== value));
  const box = (label, checked, onchange) => h("label", { class: "facet" }, h("input", { type: "checkbox", checked, onchange: (event) => onchange(event.target.checked) }), label);
  const titles = [...new Set([...all.values()].map((each) => each.title))];
  return [
    h("fieldset", {}, h("legend", {}, "Over"), Object.entries(AXES).map(([name, axis]) => h("label", { class: "facet" },
      h("input", { type: "radio", name: "axis", value: name, checked: chosen.x === name, onchange: () => keep({ x: name }) }), axis.name))),
    h("fieldset", {}, h("legend", {}, "Runs"), runs.map((run) => box([lineKey(run.place), foreign(run.name)], !chosen.without.includes(run.name),
      (wanted) => keep({ without: toggled(chosen.without, run.name, !wanted) })))),
    titles.map((title) => h("fieldset", {}, h("legend", {}, visible(title)),
      [...all].filter(([, each]) => each.title === title).map(([name]) => box(foreign(name.slice(title.length + 2)), chosenCurves(all, chosen).includes(name),
        (wanted) => keep({ curves: toggled(chosenCurves(all, chosen), name, wanted) }))))),
  ];
}

function drawn(runs, chosen) {
  const shown = runs.filter((run) => !chosen.without.includes(run.name)), all = allCurves(runs), names = chosenCurves(all, chosen);
  const axis = AXES[chosen.x];
  const curves = names.map((name) => ({ name, ...all.get(name), lines: shown.map((run) => ({ name: run.name, curve: name, place: run.place, points: pointsOf(run, name) })) }));
  const charts = curves.map(({ name, format, lines }) => {
    const placed = lines.map((line) => ({ ...line, points: along(runs[line.place], axis, line.points) })).filter((line) => line.points.length);
    return placed.length ? chart(name, placed, format, axis) : null;
  }).filter(Boolean);
  return [runsTable(shown), charts.length ? h("div", { class: "charts" }, charts) : h("p", {}, "No curve is chosen, or no run has made an update so far."), figuresTable(shown, curves)];
}

function pointsOf(run, name) {
  for (const each of run.charts) {
    const line = each.series.find((series) => `${each.title}: ${series.name}` === name);
    if (line) return line.points;
  }
  return [];
}

// Points over versions as points over an axis. An evaluation of the first weights is at 0.
function along(run, axis, points) {
  const places = new Map([[0, 0]]);
  let sum = 0;
  run.updates.forEach((update, place) => {
    sum += axis.add(update, run.updates[place - 1], run);
    places.set(update.version, sum);
  });
  return points.filter(([version]) => places.has(version)).map(([version, value]) => [places.get(version), value]);
}

function runsTable(runs) {
  const rows = runs.map((run) => h("tr", {},
    h("th", { scope: "row" }, lineKey(run.place), h("a", { href: `${address(run.name)}/` }, foreign(run.name))),
    [`${number(run.updates.at(-1)?.version ?? 0)} of ${number(run.target_updates)}`, number(run.episodes), foreign(run.model), foreign(run.folder)].map((each) => h("td", {}, each))));
  return rowsTable("Runs", ["Run", "Updates", "Episodes", "Model", "Folder"], rows);
}

// The last value of each curve and its best one, where more or less is better.
function figuresTable(runs, curves) {
  if (!curves.length) return null;
  const rows = curves.map(({ name, format, better, lines }) => h("tr", {}, h("th", { scope: "row" }, foreign(name)), lines.map(({ points }) => {
    if (!points.length) return h("td", {}, "-");
    const best = points.reduce((first, each) => (better * (each[1] - first[1]) > 0 ? each : first));
    return h("td", {}, h("b", {}, format(points.at(-1)[1])), better ? `, best ${format(best[1])} at version ${number(best[0])}` : "");
  })));
  return h("section", {}, h("h2", {}, "Last and best figures"), rowsTable("Last and best figures", ["Curve", ...runs.map(runHead)], rows));
}

function settingsTable(runs, settings) {
  if (!settings.length) return h("section", {}, h("h2", {}, "Settings"), h("p", {}, "The runs have the same settings."));
  const rows = settings.map(({ name, values }) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, visible(name))), values.map((value) => h("td", { class: "said" }, foreign(value)))));
  return h("section", {}, h("h2", {}, "Settings that differ"), rowsTable("Settings that differ", ["Setting", ...runs.map(runHead)], rows));
}

const runHead = (run) => h("th", { scope: "col" }, lineKey(run.place), foreign(run.name));
