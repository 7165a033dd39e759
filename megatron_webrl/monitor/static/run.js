// How the run learns: figures over policy versions, and the evaluations.
import { chart } from "./chart.js";
import { chartsOf, gain } from "./curves.js";
import { foreign, getJson, h, number, percent, rowsTable } from "./dom.js";

const REFRESH_MS = 5000;

export async function runPage() {
  const run = { ...(await getJson("/api/run")), updates: [] };
  const element = h("article", {}, h("h1", {}, "Run"));
  const figures = h("div", { class: "charts" });
  const evaluations = h("div", {});
  element.append(h("p", { class: "quiet" }, `${run.model}, mode ${run.mode}, groups of ${run.group_size}`), tracking(run), evaluations, figures);
  const draw = () => {
    const charts = chartsOf(run.updates, run.evaluations).map(({ title, series, format }) => chart(title, series, format));
    figures.replaceChildren(...(run.updates.length ? charts : [h("p", {}, "No update has been made so far. This page shows each as soon as it is made.")]));
    evaluations.replaceChildren(...evaluationTable(run.evaluations));
  };
  await gain(run);
  draw();
  const timer = setInterval(() => gain(run).then((news) => news && draw(), () => { /* the header says that the server does not answer */ }), REFRESH_MS);
  return { element, leave: () => clearInterval(timer) };
}

// Where the metrics are in MLflow.
function tracking({ folder, mlflow }) {
  const facts = { Folder: folder, "MLflow tracking URI": mlflow.uri, "MLflow run": mlflow.run_id ?? "MLflow has not received it so far", "Pages of MLflow": `webrl mlflow ${folder}` };
  return h("dl", { class: "facts" }, Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, foreign(value)))));
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
