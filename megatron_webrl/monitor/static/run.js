// The state of the run, what bounded an update, figures over policy versions, and the evaluations.
import { chart } from "./chart.js";
import { chartsOf, gain } from "./curves.js";
import { foreign, getJson, h, number, percent, rowsTable } from "./dom.js";

const REFRESH_MS = 5000;

export async function runPage() {
  const run = { ...(await getJson("/api/run")), updates: [] };
  const element = h("article", {}, h("h1", {}, "Run"));
  const figures = h("div", { class: "charts" });
  const state = h("div", {}), evaluations = h("div", {});
  const bound = run.timeline ? boundSection() : null;
  element.append(state, ...(bound ? [bound] : []), evaluations, figures);
  const draw = () => {
    const charts = chartsOf(run.updates, run.evaluations).map(({ title, series, format }) => chart(title, series, format));
    figures.replaceChildren(...(run.updates.length ? charts : [h("p", {}, "No update has been made so far. This page shows each as soon as it is made.")]));
    evaluations.replaceChildren(...evaluationTable(run.evaluations));
  };
  const showState = async () => state.replaceChildren(...stateParts(run, await getJson("/api/status")));
  await Promise.all([gain(run), showState()]);
  draw();
  const refresh = () => Promise.all([showState(), gain(run).then((news) => news && draw())]).catch(() => { /* the header says that the server does not answer */ });
  const timer = setInterval(refresh, REFRESH_MS);
  return { element, leave: () => clearInterval(timer) };
}

// What `webrl status` prints.
function stateParts({ model, mode, group_size, mlflow }, { lines, tables }) {
  const facts = { ...lines, model: `${model}, mode ${mode}, groups of ${group_size}`, "MLflow run": mlflow.run_id ?? "MLflow has not received it so far" };
  return [h("dl", { class: "facts" }, Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, foreign(value))))),
    ...Object.entries(tables).flatMap(([title, { columns, rows }]) => [h("h2", {}, title[0].toUpperCase() + title.slice(1)),
      rowsTable(title, columns, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, foreign(cell))))))])];
}

// What `webrl timeline` prints, once it is asked for: the server reads the files of all processes.
function boundSection() {
  const found = h("div", {}), version = h("input", { type: "number", min: 1, placeholder: "last", id: "bound-version" });
  const show = async (event) => {
    event?.preventDefault();
    found.replaceChildren(h("p", { role: "status" }, "Reading the timeline."));
    try {
      const update = await getJson(`/api/bound?version=${version.value}`);
      const rows = update.rows.map(([label, seconds, share, depth]) => h("tr", {}, h("th", { scope: "row", class: depth ? "part" : null }, label), h("td", {}, seconds.toFixed(2)), h("td", {}, percent(share))));
      found.replaceChildren(h("p", {}, `Update ${number(update.version)}: ${number(update.seconds)} s`), rowsTable("What bounded the update", ["", "Seconds", "Share"], rows));
    } catch (error) {
      found.replaceChildren(h("p", { role: "alert" }, error.message));
    }
  };
  return h("section", { class: "bound" }, h("h2", {}, "What bounded an update"),
    h("form", { onsubmit: show }, h("label", { for: "bound-version" }, "Update "), version, " ", h("button", { type: "submit" }, "Show")), found);
}

const variant = (line) => `${line.temperature ? "sampled" : "greedy"}${line.variant === "blank_images" ? ", blank images" : ""}`;

function evaluationTable(lines) {
  if (!lines.length) return [];
  const heads = ["Version", "Kind", "Variant", "Success", "95% interval", "Episodes", "Without verdict", "Steps"];
  return [h("h2", {}, "Evaluations"), rowsTable("Evaluations", heads, lines.map((line) => h("tr", {}, [
      number(line.version), line.kind, variant(line), percent(line.success_of_judged), line.interval ? line.interval.map(percent).join(" to ") : "-",
      number(line.episodes), number(Object.values(line.no_verdict ?? {}).reduce((sum, each) => sum + each, 0)), number(line.steps_mean),
    ].map((each) => h("td", {}, each)))))];
}
