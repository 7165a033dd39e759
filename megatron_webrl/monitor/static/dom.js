// Elements, requests and formats. Text from pages and models only ever becomes a text node.

// An element. Attributes whose value is null or false are left out; functions are event handlers (onclick: ...).
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key.slice(2), value);
    else if (key === "style") Object.entries(value).forEach(([name, each]) => element.style.setProperty(name, each));
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

// Characters that hide or reorder text, shown by their number.
const ACTIVE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function visible(text) {
  return String(text ?? "").replace(ACTIVE, (character) => `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`);
}

// Text that others wrote, in an element of its own that keeps its direction to itself.
export function foreign(text, name = "bdi", attributes = {}) {
  return h(name, { dir: "auto", ...attributes }, visible(text));
}

// The address of the run whose pages these are, where the server has several runs; empty at its root.
export const base = /^\/runs\/[^/]+/.exec(location.pathname)?.[0] ?? "";

export async function getJson(path, from = base) {
  const response = await fetch(from + path);
  if (response.status === 401) throw new Error("This page has no token any more. Open the address that `webrl monitor` printed.");
  const content = await response.json().catch(() => ({ error: `the server answers ${response.status}` }));
  if (!response.ok) throw new Error(content.error);
  return content;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 ? Number(value.toPrecision(digits)).toLocaleString("en") : value.toExponential(1);
}

export const percent = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)}%`);

export function time(seconds) {
  return seconds ? new Date(1000 * seconds).toISOString().replace("T", " ").slice(0, 19) : "-";
}

export function outcome(row) {
  const kind = row.outcome === "success" ? "good" : row.outcome === "failure" ? "bad" : "masked";
  return h("span", { class: `tag ${kind}` }, visible(row.outcome));
}

// A table that scrolls sideways. `heads` are th elements or texts, `rows` are tr elements.
export function rowsTable(label, heads, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h("table", { class: "rows" },
      h("thead", {}, h("tr", {}, heads.map((each) => (each instanceof Element ? each : h("th", { scope: "col" }, each))))),
      h("tbody", {}, rows)));
}

export function screenshotImage(episode, number, alt) {
  const src = episode.imageUrl ? episode.imageUrl(number) : `${base}/api/episodes/${episode.id}/images/${number}`;
  return h("img", { src, alt, loading: "lazy" });
}

export function actionName(step) {
  return step.action ? step.action.kind.replaceAll("_", " ") : "no action";
}
