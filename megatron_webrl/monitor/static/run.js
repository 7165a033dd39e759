// How the run learns: figures over policy versions, from updates.jsonl, and the evaluations.
import { chart } from "./chart.js";
import { getJson, h, number, percent, rowsTable } from "./dom.js";

const REFRESH_MS = 5000;
const extra = (name) => (update) => update.extra[name];
const CHARTS = [
  ["Success", { "sampled, temperature 1": extra("rollout_success_rate"), "within trained groups": extra("success_rate") }, percent],
  ["Reward of trained episodes", { mean: (u) => u.reward_mean }, number],
  ["Steps per episode", { mean: (u) => u.steps_mean }, number],
  ["Response tokens per step", { mean: (u) => u.response_tokens_mean }, number],
  ["Entropy, nats per token", { entropy: extra("entropy") }, number],
  ["Staleness, versions", { mean: (u) => u.staleness_mean, largest: (u) => u.staleness_max }, number],
  ["Log-probability mismatch", { largest: (u) => u.logprob_mismatch_max }, number],
  ["Clipped tokens", { share: (u) => u.clip_fraction }, percent],
  ["Gradient norm", { norm: extra("gradient_norm") }, number],
  ["Masked episodes", { share: extra("masked_rate") }, percent],
  ["Format errors", { "share of steps": extra("format_error_rate") }, percent],
  ["Trained tokens per second", { tokens: (u) => u.tokens_per_second }, number],
  ["Seconds of an update", { "waits for groups": (u) => u.seconds.wait, trains: (u) => u.seconds.train, "sends weights": (u) => u.seconds.sync }, number],
  ["Engine idle", { share: extra("engine/idle_fraction") }, percent],
];
const PATTERNS = [
  ["Dropped episodes, by reason", /^dropped\/(.+)/, number],
  ["Success by difficulty", /^difficulty\/(.+)\/success_rate$/, percent],
  ["Success by site", /^rollout_success_rate\/(.+)/, percent],
];

export async function runPage() {
  const run = await getJson("/api/run");
  const updates = await getJson("/api/updates");
  const element = h("article", {}, h("h1", {}, "Run"));
  const figures = h("div", { class: "charts" });
  const evaluations = h("div", {});
  element.append(h("p", { class: "quiet" }, `${run.model}, mode ${run.mode}, groups of ${run.group_size}`), evaluations, figures);
  const draw = async () => {
    figures.replaceChildren(...(updates.length ? charts(updates) : [h("p", {}, "No update has been made so far. This page shows each as soon as it is made.")]));
    evaluations.replaceChildren(...evaluationTable(await getJson("/api/evaluations")));
  };
  await draw();
  const timer = setInterval(async () => {
    try {
      const added = await getJson(`/api/updates?after=${updates.at(-1)?.version ?? -1}`);
      if (!added.length) return;
      updates.push(...added);
      await draw();
    } catch { /* the header says that the server does not answer */ }
  }, REFRESH_MS);
  return { element, leave: () => clearInterval(timer) };
}

function charts(updates) {
  const named = [...CHARTS];
  const keys = Object.keys(updates.at(-1).extra);
  for (const [title, pattern, format] of PATTERNS) {
    const found = keys.map((key) => pattern.exec(key)).filter(Boolean).slice(0, 12);
    if (found.length) named.push([title, Object.fromEntries(found.map((match) => [match[1], extra(match[0])])), format]);
  }
  return named.map(([title, lines, format]) => {
    const series = Object.entries(lines).map(([name, read]) => ({
      name, points: updates.map((update) => [update.version, read(update)]).filter(([, value]) => Number.isFinite(value)),
    })).filter((each) => each.points.length);
    return series.length ? chart(title, series, format) : null;
  }).filter(Boolean);
}

function evaluationTable(lines) {
  if (!lines.length) return [];
  const heads = ["Version", "Kind", "Success", "95% interval", "Episodes", "Without verdict", "Steps"];
  return [h("h2", {}, "Evaluations"), rowsTable("Evaluations", heads, lines.map((line) => h("tr", {}, [
      number(line.version), line.kind.replaceAll("_", " "), percent(line.success_of_judged), line.interval ? line.interval.map(percent).join(" to ") : "-",
      number(line.episodes), number(Object.values(line.no_verdict ?? {}).reduce((sum, each) => sum + each, 0)), number(line.steps_mean),
    ].map((each) => h("td", {}, each)))))];
}
