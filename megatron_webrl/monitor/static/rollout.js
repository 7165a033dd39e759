// One rollout that runs: its state, and its steps so far with the latest screenshot.
import { base, foreign, getJson, h, number, visible } from "./dom.js";
import { finalScreenshot, stepSection } from "./episode.js";
import { stateName } from "./rollouts.js";

const REFRESH = 1000, PATIENCE = 5; // milliseconds; refreshes without the rollout until it counts as ended

export async function rolloutPage(argument) {
  const [worker, key] = argument.split("/").map(decodeURIComponent);
  const name = new URLSearchParams({ worker, key });
  const title = h("h1", {}, "A rollout"), state = h("p", { role: "status" }), facts = h("dl", { class: "facts" });
  const steps = h("div"), last = h("div");
  let drawn = "", missed = 0, timer = 0, left = false;

  async function refresh() {
    try {
      show(await getJson(`/api/rollout?${name}`));
    } catch (error) {
      state.textContent = error.message;
    }
    if (!left && missed < PATIENCE) timer = setTimeout(refresh, REFRESH);
  }

  function show({ time, rollout, episode, error }) {
    missed = rollout ? 0 : missed + 1;
    if (!rollout) {
      const [, kind, ticket] = key.match(/^(.*)-(\d+)-\d+$/) ?? [];
      const stored = kind ? [" ", h("a", { href: `#/episodes?${new URLSearchParams({ kind, ticket_min: ticket, ticket_max: ticket })}` }, "Stored episodes of its ticket")] : [];
      state.replaceChildren(missed < PATIENCE ? "Waiting for its worker." : `This rollout has ended${error ? `, or is out of reach: ${error}` : ""}.`, ...stored);
      return;
    }
    const text = `${stateName(rollout)}, step ${number(rollout.step)} of ${number(rollout.limit)}`;
    if (state.textContent !== text) state.textContent = text;
    const rows = {
      "Seconds in the state": number(Math.max(0, time - rollout.since), 2), Site: foreign(rollout.site), Task: foreign(rollout.task), Difficulty: visible(rollout.difficulty),
      Version: rollout.version === null ? "-" : number(rollout.version), Ticket: `${rollout.ticket}, episode ${rollout.index + 1} of ${rollout.group_size}`,
      Kind: visible(rollout.kind), Worker: visible(rollout.worker), Try: number(rollout.tries),
    };
    facts.replaceChildren(...Object.entries(rows).map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value))));
    if (!episode) return;
    title.replaceChildren(foreign(episode.instruction || rollout.task));
    episode.imageUrl = (place) => `${base}/api/rollout/images/${place}?${name}&try=${rollout.tries}`;
    const start = `${rollout.tries}`;
    if (!drawn.startsWith(`${start}:`)) steps.replaceChildren();
    steps.append(...episode.steps.slice(steps.children.length).map((step) => stepSection(episode, step)));
    const seen = `${start}:${episode.images}:${episode.steps.length}`;
    if (seen !== drawn) last.replaceChildren(finalScreenshot(episode, "The page now") ?? "");
    drawn = seen;
  }

  await refresh();
  const element = h("article", {}, title, state, facts, h("p", { class: "links" }, h("a", { href: "#/rollouts" }, "All rollouts")), last, steps);
  return { element, leave: () => { left = true; clearTimeout(timer); } };
}
