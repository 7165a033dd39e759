// Routes: #/ the run, #/rollouts?filters, #/rollout/WORKER/KEY, #/episodes?filters, #/episode/ID, #/group/ID (its
// episodes side by side), #/task/ID, #/compare?choice (several runs).
import { episodesPage } from "./episodes.js";
import { episodePage } from "./episode.js";
import { comparePage } from "./compare.js";
import { comparisonPage } from "./comparison.js";
import { rolloutPage } from "./rollout.js";
import { rolloutsPage } from "./rollouts.js";
import { runPage } from "./run.js";
import { getJson, h, number, visible } from "./dom.js";

const content = document.getElementById("content");
const pages = {
  "": ["run", runPage],
  rollouts: ["rollouts", rolloutsPage],
  rollout: ["rollouts", rolloutPage],
  episodes: ["episodes", episodesPage],
  episode: ["episodes", episodePage],
  group: ["episodes", (id) => comparisonPage(id, "group")],
  task: ["episodes", (id) => comparisonPage(id, "task")],
  compare: ["compare", comparePage],
};
let shown = 0; // number of the navigation whose page may be shown
let leave = () => {}; // of the page that is shown

async function navigate() {
  const mine = ++shown;
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  const [tab, page] = pages[name] ?? pages[""];
  document.querySelectorAll("nav a").forEach((each) => {
    if (each.dataset.page === tab) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  });
  leave();
  leave = () => {};
  try {
    const found = await page(rest.join("/"), new URLSearchParams(query ?? ""));
    if (mine !== shown) return;
    content.replaceChildren(found.element ?? found);
    leave = found.leave ?? leave;
    document.title = `${content.querySelector("h1")?.textContent ?? ""} - ${document.getElementById("run-name").textContent}`;
    if (!found.keepFocus) content.focus({ preventScroll: true });
  } catch (error) {
    if (mine === shown) content.replaceChildren(h("h1", {}, "This cannot be shown"), h("p", { role: "alert" }, error.message));
  }
}

async function showState() {
  try {
    const run = await getJson("/api/run");
    document.getElementById("run-name").textContent = visible(run.name);
    document.getElementById("run-state").textContent =
      `update ${number(run.version)} of ${number(run.target_updates)}, ${number(run.episodes)} episodes`;
  } catch (error) {
    document.getElementById("run-state").textContent = "the server does not answer";
  }
}

const themes = ["auto", "light", "dark"];
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("theme", theme);
}
document.getElementById("theme").addEventListener("click", () => {
  const now = localStorage.getItem("theme") ?? "auto";
  setTheme(themes[(themes.indexOf(now) + 1) % themes.length]);
});

async function showLinks() {
  const { runs } = await getJson("/api/runs", "");
  document.querySelector("[data-page=compare]").hidden = runs.length < 2;
}

setTheme(themes.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto");
addEventListener("hashchange", navigate);
setInterval(showState, 5000);
await Promise.all([showState(), showLinks()]);
await navigate();
