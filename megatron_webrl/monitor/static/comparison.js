// Episodes side by side: a group, or the same task at different versions.
import { actionName, foreign, getJson, h, number, outcome, screenshotImage, time, visible } from "./dom.js";

const MOST = 16;

export async function comparisonPage(id, which) {
  const all = (await getJson(`/api/episodes/${id}/related`))[which];
  const stored = all.filter((row) => row.stored);
  const rows = which === "group" || stored.length <= MOST ? stored.slice(0, MOST) : spread(stored);
  const episodes = await Promise.all(rows.map((row) => getJson(`/api/episodes/${row.id}`)));
  const title = which === "group" ? `Ticket ${all[0].ticket}: the episodes of its group` : "The same task, oldest first";
  return h("article", {}, h("h1", {}, title), foreign(all[0].instruction || all[0].task, "p"),
    h("p", { class: "quiet" }, `${rows.length} shown of ${all.length}` + (stored.length < all.length ? `, ${all.length - stored.length} not stored any more` : "")),
    h("div", { class: "columns", tabindex: 0, role: "region", "aria-label": "Episodes side by side" }, episodes.map(column)));
}

// The first, the last, and episodes at equal distances between them.
function spread(rows) {
  return Array.from({ length: MOST }, (_, place) => rows[Math.round((place * (rows.length - 1)) / (MOST - 1))]);
}

function column(episode) {
  return h("section", { "aria-label": `Episode ${episode.index}` },
    h("h2", {}, h("a", { href: `#/episode/${episode.id}` }, `Episode ${episode.index}`), " ", outcome(episode)),
    h("p", { class: "quiet" }, `version ${number(episode.newest_version)}, reward ${number(episode.reward)}` +
      (episode.advantage === null ? "" : `, advantage ${number(episode.advantage)}`) + `, ${time(episode.finished_at)}`),
    h("ol", {}, episode.steps.map((step) => h("li", {},
      step.image === null ? null : screenshotImage(episode, step.image, `Screenshot before step ${step.number}`),
      h("div", {}, step.action ? actionName(step) : h("span", { class: "tag bad" }, visible(step.format_error ?? "no action")),
        step.action?.coordinate ? ` at ${step.action.coordinate.join(", ")}` : "", step.action?.text ? [": ", foreign(step.action.text)] : null)))),
    episode.verdict?.reason ? foreign(episode.verdict.reason, "p") : null);
}
