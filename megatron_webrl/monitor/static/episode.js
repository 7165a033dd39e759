// One episode: its facts, the verdict, and each step with screenshot, prompt and tokens.
import { actionName, foreign, getJson, h, number, outcome, rowsTable, screenshotImage, svg, time, visible } from "./dom.js";

export async function episodePage(id) {
  const episode = await getJson(`/api/episodes/${id}`);
  const related = await getJson(`/api/episodes/${id}/related`);
  const strip = h("nav", { class: "strip", "aria-label": "Steps" }, episode.steps.map((step) =>
    h("a", { href: `#/episode/${id}`, onclick: (event) => { event.preventDefault(); jump(step.number); } },
      screenshot(episode, step, true), h("span", {}, `${step.number}. ${actionName(step)}`))));
  const element = h("article", {},
    h("h1", {}, foreign(episode.instruction || episode.task)),
    facts(episode),
    h("p", { class: "links" },
      related.group.length > 1 ? h("a", { href: `#/group/${id}` }, `Its group of ${related.group.length}, side by side`) : null,
      related.task.length > 1 ? h("a", { href: `#/task/${id}` }, `The same task, ${related.task.length} times`) : null),
    verdict(episode), strip, episode.steps.map((step) => stepSection(episode, step)), finalScreenshot(episode),
  );
  const onKey = (event) => {
    if (event.target.closest("input, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = [...element.querySelectorAll("section.step")];
    const now = steps.findIndex((each) => each.getBoundingClientRect().bottom > 80);
    if (event.key === "j") steps[Math.min(now + 1, steps.length - 1)]?.scrollIntoView();
    if (event.key === "k") steps[Math.max(now - 1, 0)]?.scrollIntoView();
  };
  addEventListener("keydown", onKey);
  return { element, leave: () => removeEventListener("keydown", onKey) };
}

function jump(number) {
  const section = document.getElementById(`step-${number}`);
  section.scrollIntoView();
  section.focus({ preventScroll: true });
}

function facts(episode) {
  const became = episode.kind === "training" ? episode.disposition : `evaluation (${episode.kind})`;
  const rows = {
    Outcome: outcome(episode), "End": visible(episode.end_reason), "Reward": number(episode.reward),
    "Advantage": episode.advantage === null ? "none" : number(episode.advantage), "Became": visible(became),
    "Site": foreign(episode.site), "Task": foreign(episode.task), "Difficulty": episode.difficulty,
    "Steps": number(episode.steps.length), "Response tokens": number(episode.response_tokens),
    "Versions": episode.oldest_version === null ? "-" : episode.oldest_version === episode.newest_version ? number(episode.newest_version) : `${episode.oldest_version} to ${episode.newest_version}`,
    "Ticket": `${episode.ticket}, episode ${episode.index}`, "Worker": visible(episode.worker),
    "Seconds": number(episode.seconds), "Finished (UTC)": time(episode.finished_at), "Temperature": number(episode.temperature),
  };
  if (episode.tries > 1) rows.Tries = `${episode.tries}, ${number(episode.discarded_tokens)} tokens discarded`;
  if (episode.answer !== null) rows.Answer = foreign(episode.answer);
  return h("dl", { class: "facts" }, Object.entries(rows).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function verdict(episode) {
  const found = episode.verdict;
  if (!found) return null;
  const wanted = [
    episode.evaluation_input.answer !== null ? h("p", {}, "Wanted answer: ", foreign(episode.evaluation_input.answer)) : null,
    episode.evaluation_input.facts.length ? h("ul", {}, episode.evaluation_input.facts.map((each) => foreign(`${each.description}: ${each.fact}`, "li"))) : null,
  ];
  const stages = found.stages.map((stage) => h("tr", {},
    foreign(`${stage.name} ${stage.subject}`, "td"), h("td", {}, h("span", { class: `tag ${stage.decision === "yes" ? "good" : stage.decision === "no" ? "bad" : "masked"}` }, visible(stage.decision))),
    foreign(stage.text, "td", { class: "said" }), foreign(stage.errors.join(", "), "td"), foreign(stage.model, "td"), h("td", {}, h("code", {}, stage.digest.slice(0, 12)))));
  return h("details", { open: true, class: "verdict" },
    h("summary", {}, "Verdict: ", outcome(found), ` by ${visible(found.protocol || found.evaluator)}`),
    found.reason ? foreign(found.reason, "p") : null, wanted,
    stages.length ? rowsTable("Stages of the judge", ["Stage", "Decision", "Reply", "Failed tries", "Model", "Request"], stages) : null,
    found.calls ? h("p", { class: "quiet" }, `${found.calls} calls, ${number(found.prompt_tokens)} + ${number(found.response_tokens)} tokens, ${found.dollars.toFixed(4)} dollars, ${number(found.seconds)} s`) : null);
}

export function stepSection(episode, step) {
  return h("section", { class: "step", id: `step-${step.number}`, tabindex: -1, "aria-label": `Step ${step.number}` },
    h("div", { class: "seen" }, screenshot(episode, step, false),
      h("p", { class: "quiet" }, foreign(step.title), " ", foreign(step.url, "bdi", { class: "url" }))),
    h("div", { class: "said" },
      h("h2", {}, `Step ${step.number}: ${actionName(step)} `, step.page_changed ? null : h("span", { class: "tag masked" }, "page unchanged")),
      step.format_error ? h("p", {}, h("span", { class: "tag bad" }, "format error"), " ", visible(step.format_error)) : null,
      step.leniencies.length ? h("p", { class: "quiet" }, `accepted in spite of: ${step.leniencies.join(", ")}`) : null,
      step.action ? actionFields(step.action) : null,
      response(step),
      prompt(episode, step),
      h("p", { class: "quiet" }, `${number(step.prompt_tokens)} prompt tokens (${number(step.cached_prompt_tokens)} cached), ${number(step.tokens.length)} response tokens (${step.finish_reason}), ` +
        `${number(step.seconds_generation)} s generating, ${number(step.seconds_browser)} s in the browser`)));
}

function actionFields(action) {
  return h("dl", { class: "facts" }, Object.entries(action).filter(([name]) => name !== "kind").map(([name, value]) =>
    h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, foreign(Array.isArray(value) ? value.join(", ") : value)))));
}

// The response, token by token; darker is less likely. A click shows a token's figures.
function response(step) {
  const detail = h("p", { class: "quiet", role: "status" }, "Choose a token to see its probability and version.");
  const versions = new Set(step.tokens.map((each) => each.version));
  const oldest = Math.min(...versions);
  const tokens = step.tokens.map((token) => h("button", {
    type: "button", class: `token surprise-${Math.min(4, Math.floor(-token.logprob))}${token.version > oldest ? " newer" : ""}`,
    onclick: () => { detail.textContent = `"${visible(token.text)}": probability ${percentOf(token.logprob)}, log-probability ${token.logprob}, version ${token.version}`; },
  }, token.text === "" ? "·" : visible(token.text)));
  return h("div", {}, h("div", { class: "tokens", dir: "auto", role: "group", "aria-label": "Response" }, tokens),
    detail, versions.size > 1 ? h("p", { class: "quiet" }, "Underlined: of a newer policy version; the weights changed within the response.") : null);
}

const percentOf = (logprob) => `${(100 * Math.exp(logprob)).toPrecision(3)}%`;

function prompt(episode, step) {
  const shown = step.images.length, dropped = step.dropped_images;
  const parts = () => step.prompt.map((part) => "text" in part ? foreign(part.text, "pre")
    : h("figure", { class: "in-prompt" }, part.image === null ? null : screenshotImage(episode, part.image, `Screenshot ${part.image + 1} in the prompt`),
      h("figcaption", {}, `screenshot ${part.image + 1}, ${number(part.tokens)} tokens`)));
  const text = `The prompt: ${shown} screenshot${shown === 1 ? "" : "s"}` + (dropped.length ? `, without ${dropped.map((each) => each + 1).join(", ")}` : "");
  const details = h("details", { ontoggle: () => { if (details.open && details.children.length === 1) details.append(...parts()); } }, h("summary", {}, text));
  return details;
}

// The screenshot with the action drawn in. Coordinates are 0..1000 on both axes.
function screenshot(episode, step, small) {
  if (step.image === null) return h("span", { class: "quiet" }, "no screenshot");
  const { action } = step, points = [action?.coordinate, action?.end_coordinate].filter(Boolean);
  const marks = points.map(([x, y], place) => h("span", { class: place ? "mark end" : "mark", style: { left: `${x / 10}%`, top: `${y / 10}%` } }));
  if (points.length === 2) {
    const [[x1, y1], [x2, y2]] = points;
    marks.push(svg("svg", { viewBox: "0 0 1000 1000", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("line", { x1, y1, x2, y2, class: "path" })));
  }
  const alt = small ? "" : `Screenshot before step ${step.number}${action?.coordinate ? `, with ${actionName(step)} at ${action.coordinate.join(", ")}` : ""}`;
  return h("span", { class: "shot" }, screenshotImage(episode, step.image, alt), marks,
    !small && action?.text ? h("span", { class: "typed", tabindex: 0 }, "types: ", foreign(action.text)) : null);
}

export function finalScreenshot(episode, title = "After the last step") {
  const shown = Math.max(-1, ...episode.steps.flatMap((step) => step.images));
  if (episode.images <= shown + 1) return null;
  return h("section", { class: "step", "aria-label": title }, h("div", { class: "seen" }, h("span", { class: "shot" }, screenshotImage(episode, episode.images - 1, `Screenshot: ${title}`))),
    h("div", { class: "said" }, h("h2", {}, title)));
}
