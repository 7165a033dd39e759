// What can be drawn of a run: curves over its updates, from updates.jsonl, and its evaluations, from evaluations.jsonl.
import { getJson, number, percent } from "./dom.js";

const extra = (name) => (update) => update.extra[name];
const evaluated = (line) => (line.temperature === 0 ? "greedy" : `evaluated at temperature ${line.temperature}`);
const MOST_OF_PATTERN = 12; // lines of one chart

// [title, lines by name, format, better: 1 if more is better, -1 if less is, 0 if neither]
const CHARTS = [
  ["Success", { "sampled in training": extra("rollout_success_rate"), "within trained groups": extra("success_rate") }, percent, 1],
  ["Reward of trained episodes", { mean: (u) => u.reward_mean }, number, 1],
  ["Steps per episode", { mean: (u) => u.steps_mean }, number, 0],
  ["Response tokens per step", { mean: (u) => u.response_tokens_mean }, number, 0],
  ["Entropy, nats per token", { entropy: extra("entropy") }, number, 0],
  ["Staleness, versions", { mean: (u) => u.staleness_mean, largest: (u) => u.staleness_max }, number, -1],
  ["Log-probability mismatch, nats", { largest: (u) => u.logprob_mismatch_max }, number, -1],
  ["Clipped tokens", { share: (u) => u.clip_fraction, "by the dual clip": extra("dual_clipped"), "importance weight capped": extra("importance_weight_capped"), "below its floor": extra("importance_weight_floored"), "rejected by KL": extra("kl_rejected"), "too old": extra("lag_masked") }, percent, 0],
  ["Gradient norm", { norm: extra("gradient_norm") }, number, 0],
  ["Masked episodes", { share: extra("masked_rate") }, percent, -1],
  ["Format errors", { "share of steps": extra("format_error_rate") }, percent, -1],
  ["Trained tokens per second", { tokens: (u) => u.tokens_per_second }, number, 1],
  ["Seconds of an update", { "waits for groups": (u) => u.seconds.wait, trains: (u) => u.seconds.train, "sends weights": (u) => u.seconds.sync }, number, -1],
  ["Engine idle", { share: extra("engine/idle_fraction") }, percent, -1],
  ["Host memory, GiB", { "trainer rank": extra("memory/trainer_gib"), "trainer rank, peak": extra("memory/trainer_peak_gib"), "worker with engine and browsers": extra("memory/worker_gib"), "worker, peak": extra("memory/worker_peak_gib") }, number, -1],
  ["GPU memory, GiB", { "trainer rank, peak of the update": extra("memory/trainer_gpu_gib") }, number, -1],
];
const PATTERNS = [
  ["Masked episodes, by reason", /^masked_rate\/(.+)/, percent, -1],
  ["Log-probability mismatch by version lag, mean, nats", /^logprob_mismatch\/mean\/(.+)/, number, -1],
  ["Dropped episodes since the start, by reason", /^dropped\/(.+)/, number, 0],
  ["Success by difficulty", /^difficulty\/(.+)\/success_rate$/, percent, 1],
  ["Success by site", /^rollout_success_rate\/(.+)/, percent, 1],
];

// Take in what a run has gained since the last call, {updates, evaluations}; whether that was anything. An address: of the run.
export async function gain(run, ...from) {
  const { version } = await getJson("/api/run", ...from);
  const again = version < (run.updates.at(-1)?.version ?? -1); // rolled back, or another run of the name
  if (again) run.updates.length = 0;
  const added = await getJson(`/api/updates?after=${run.updates.at(-1)?.version ?? -1}`, ...from);
  const evaluations = await getJson("/api/evaluations", ...from);
  const news = again || added.length > 0 || evaluations.length !== run.evaluations?.length;
  run.updates.push(...added);
  run.evaluations = evaluations;
  return news;
}

// The charts of a run that have points: {title, format, better, series: [{name, points: [version, value]}]}.
export function chartsOf(updates, evaluations) {
  const named = CHARTS.map(([title, lines, ...rest]) => [title, Object.entries(lines), ...rest]);
  const keys = [...new Set(updates.flatMap((update) => Object.keys(update.extra)))].sort();
  for (const [title, pattern, ...rest] of PATTERNS) {
    const found = keys.map((key) => pattern.exec(key)).filter((match) => match && updates.some((update) => update.extra[match[0]]));
    if (found.length) named.push([title, found.slice(0, MOST_OF_PATTERN).map((match) => [match[1], extra(match[0])]), ...rest]);
  }
  return named.map(([title, lines, format, better]) => {
    const series = lines.map(([name, read]) => ({ name, points: updates.map((update) => [update.version, read(update)]) }));
    if (title === "Success") series.push(...evaluationSeries(evaluations));
    series.forEach((each) => { each.points = each.points.filter(([, value]) => Number.isFinite(value)); });
    return { title, format, better, series: series.filter((each) => each.points.length) };
  }).filter((chart) => chart.series.length);
}

function evaluationSeries(lines) {
  const found = new Map();
  for (const line of lines) {
    const name = `${evaluated(line)}${line.variant === "blank_images" ? ", blank images" : ""}`;
    found.set(name, [...(found.get(name) ?? []), [line.version, line.success_of_judged]]);
  }
  return [...found].map(([name, points]) => ({ name, points: points.sort((a, b) => a[0] - b[0]) }));
}
