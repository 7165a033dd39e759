// The list of episodes: filters at the side, a table with a page of rows.
import { base, foreign, getJson, h, number, outcome, rowsTable, time, visible } from "./dom.js";

const PAGE = 50;
const NAMES = {
  kind: "Kind", outcome: "Outcome", disposition: "Became", end_reason: "End", difficulty: "Difficulty", site: "Site",
  worker: "Worker", source: "Source",
};
const LIMITS = {
  newest_version: "Version", reward: "Reward", steps: "Steps", response_tokens: "Response tokens", seconds: "Seconds",
};
const COLUMNS = [
  ["finished_at", "Finished (UTC)", (row) => time(row.finished_at)],
  ["outcome", "Outcome", outcome],
  ["reward", "Reward", (row) => number(row.reward)],
  ["site", "Site", (row) => foreign(row.site)],
  ["task", "Task", (row) => foreign(row.instruction || row.task, "bdi", { class: "clip" })],
  ["steps", "Steps", (row) => number(row.steps)],
  ["response_tokens", "Tokens", (row) => number(row.response_tokens)],
  ["newest_version", "Version", (row) => number(row.newest_version)],
  ["seconds", "Seconds", (row) => number(row.seconds)],
  [null, "Became", (row) => visible(row.kind === "training" ? row.disposition : row.kind)],
];

export async function episodesPage(_, query) {
  const offset = Number(query.get("offset") ?? 0);
  const found = await getJson(`/api/episodes?${query}&limit=${PAGE}`);
  const set = (changes) => {
    const next = new URLSearchParams(query);
    next.delete("offset");
    for (const [name, value] of Object.entries(changes)) {
      next.delete(name);
      [value].flat().filter((each) => each !== "" && each !== null).forEach((each) => next.append(name, each));
    }
    location.hash = `#/episodes?${next}`;
  };
  const last = Math.min(offset + PAGE, found.total);
  const pager = h("p", { class: "pager" },
    `${found.total ? number(offset + 1) : 0} to ${number(last)} of ${number(found.total)} episodes `,
    h("button", { type: "button", disabled: offset === 0, onclick: () => set({ offset: Math.max(0, offset - PAGE) }) }, "Previous"),
    h("button", { type: "button", disabled: last >= found.total, onclick: () => set({ offset: offset + PAGE }) }, "Next"),
    query.size ? h("a", { href: "#/episodes" }, "Clear filters") : null,
  );
  return h("div", { class: "with-side" },
    h("aside", { "aria-label": "Filters" }, h("details", { open: innerWidth > 760 }, h("summary", {}, "Filters"),
      search(query, set), limits(query, set), facets(found.facets, query, set))),
    h("section", {}, h("h1", {}, "Episodes"), pager, table(found.rows, query, set)),
  );
}

function search(query, set) {
  const box = h("input", { type: "search", name: "text", value: query.get("text") ?? "", "aria-label": "Words in instruction, task, site or reason" });
  return h("form", { onsubmit: (event) => { event.preventDefault(); set({ text: box.value.trim() }); } },
    h("label", {}, "Words ", box), h("button", {}, "Search"));
}

function limits(query, set) {
  const rows = Object.entries(LIMITS).map(([name, label]) => {
    const inputs = ["min", "max"].map((end) => h("input", {
      type: "number", step: "any", value: query.get(`${name}_${end}`) ?? "", placeholder: end, "aria-label": `${label}, ${end}`,
      onchange: (event) => set({ [`${name}_${end}`]: event.target.value }),
    }));
    return h("tr", {}, h("th", { scope: "row" }, label), inputs.map((each) => h("td", {}, each)));
  });
  return h("table", { class: "limits" }, h("tbody", {}, rows));
}

function facets(found, query, set) {
  return Object.entries(found).filter(([name, values]) => values.length > 1 || query.has(name)).map(([name, values]) => {
    const chosen = query.getAll(name);
    const missing = chosen.filter((each) => !values.some(([value]) => value === each)).map((each) => [each, 0]);
    const boxes = [...values, ...missing].map(([value, count]) => h("label", { class: "facet" },
      h("input", {
        type: "checkbox", checked: chosen.includes(value),
        onchange: (event) => set({ [name]: event.target.checked ? [...chosen, value] : chosen.filter((each) => each !== value) }),
      }),
      foreign(value), h("span", { class: "count" }, number(count))));
    return h("details", { open: chosen.length > 0 || values.length <= 8 }, h("summary", {}, NAMES[name]), boxes);
  });
}

function table(rows, query, set) {
  const sort = query.get("sort") ?? "-finished_at";
  const heads = COLUMNS.map(([name, label]) => {
    if (!name) return h("th", { scope: "col" }, label);
    const direction = sort === name ? "ascending" : sort === `-${name}` ? "descending" : null;
    const next = sort === `-${name}` ? name : `-${name}`;
    return h("th", { scope: "col", "aria-sort": direction },
      h("button", { type: "button", class: "sort", onclick: () => set({ sort: next }) }, label, direction ? (direction === "ascending" ? " ▲" : " ▼") : ""));
  });
  const body = rows.map((row) => h("tr", { class: row.stored ? null : "gone" },
    COLUMNS.map(([, , show], place) => h("td", {},
      place ? show(row) : row.stored ? h("a", { href: `#/episode/${row.id}` }, show(row)) : h("span", { title: "not stored any more" }, show(row))))));
  const none = h("tr", {}, h("td", { colspan: COLUMNS.length }, "No episode passes these filters."));
  return rowsTable("Table of episodes", heads, body.length ? body : none);
}
