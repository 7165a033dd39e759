"""The pages of MiniWoB++: which there are, how an episode is started in one, and what it then says."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from megatron_webrl.config.setting import ConfigError

UNSUPPORTED_ENVIRONMENTS = {"hover-shape": "its page never gives a reward and never ends"}
"""Pages of the package that are no tasks, and why."""

STATEFUL_ENVIRONMENTS = frozenset({
    "book-flight", "book-flight-nodelay", "choose-date", "choose-date-easy", "choose-date-medium",
    "choose-date-nodelay", "copy-paste", "copy-paste-2", "scroll-text", "scroll-text-2", "use-colorwheel",
    "use-colorwheel-2", "chase-circle", "drag-cube", "moving-items", "simon-says", "stock-market", "terminal",
})  # fmt: skip
"""Environments whose page, started anew after an episode, may look otherwise than a fresh one: what was scrolled or
opened stays so, or movements go on."""

FIXED_DATE = "2025-01-01T12:00:00Z"
"""The day on all pages: some show it, or calendars from it. Later than any date that they ask for."""

STARTUP_ANIMATION_MS = {"click-pie": 3000}
"""How long a page that unfolds itself at the start may take to come to rest: longer than a session waits."""

# Dates are shifted, not stopped: pages measure with them. The reward panel and the trace of clicks would leak into the
# screenshot, and the cover that waits for START would hide the last state of the page. The page's own time limit is put
# out of reach: episodes are limited in steps; its countdown would be a change of the page every second. The mark tells
# an episode from a page that was merely loaded again. All that is done once; what an earlier episode has left, its
# scrolling and its focus, is taken away.
START_SCRIPT = """async ({seed, today, unfoldingMs}) => {
  if (!window.episodeRuns) {
    const Real = Date, shift = Real.parse(today) - Real.now(), now = () => Real.now() + shift;
    window.Date = new Proxy(Real, {
      construct: (target, given, made) => Reflect.construct(target, given.length ? given : [now()], made),
      apply: () => new Real(now()).toString(),
      get: (target, name) => name === "now" ? now : Reflect.get(target, name),
    });
    Real.prototype.constructor = window.Date;
    const style = document.createElement("style");
    style.textContent =
      "#reward-display, #reward-reason, #click-canvas, #sync-task-cover { display: none !important; }";
    document.head.appendChild(style);
    core.EPISODE_MAX_TIME = 2e9;
  } else {
    scrollTo(0, 0);
    getSelection().removeAllRanges();
    document.activeElement.blur();
  }
  Math.seedrandom(seed);
  core.startEpisodeReal();
  core.clearTimer();
  const frame = () => new Promise(requestAnimationFrame);
  while (!WOB_TASK_READY) await frame();
  window.episodeRuns = true;
  const utterance = core.getUtterance();
  let changes = unfoldingMs;
  const observer = new MutationObserver(() => { changes += 1; });
  observer.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  for (const end = performance.now() + unfoldingMs; changes && performance.now() < end; ) {
    changes = 0;
    await frame();
    await frame();
  }
  observer.disconnect();
  return typeof utterance === "string" ? utterance : utterance.utterance;
}"""

IS_STARTED_SCRIPT = "() => Boolean(window.episodeRuns)"
"""Whether a page has been started, and not been loaded again since."""

# The reward as the page gives it, before it is reduced by the time that the episode took.
RESULT_SCRIPT = """() => window.episodeRuns && WOB_DONE_GLOBAL ? [WOB_RAW_REWARD_GLOBAL, true] : [null, false]"""


def pages_folder() -> Path:
    """The package's folder of pages. Raises ConfigError if MiniWoB++ is not installed."""
    # Found, not imported: importing would pull in selenium and gymnasium, which are not needed.
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("tasks.source=miniwob needs the package miniwob; install it with pip install miniwob==1.1.0")
    return Path(spec.submodule_search_locations[0]) / "html"


def all_environments(folder: Path | None = None) -> list[str]:
    """Names of all environments of the installed package that can be played, sorted.

    Those of its flight pages are flight.<page>, as the package calls them.
    """
    pages = folder or pages_folder()
    names = [file.stem for file in (pages / "miniwob").glob("*.html")]
    names += [f"flight.{file.parent.name}" for file in (pages / "flight").glob("*/wrapper.html")]
    return sorted(set(names) - set(UNSUPPORTED_ENVIRONMENTS))


def check_supported(names: Iterable[str]) -> None:
    """Raises ConfigError for an environment whose page is no task."""
    for name in names:
        if name in UNSUPPORTED_ENVIRONMENTS:
            raise ConfigError(
                f"tasks.environments: {name} cannot be used: {UNSUPPORTED_ENVIRONMENTS[name]}; leave it out"
            )


def page_path(environment: str) -> str:
    """Where the server has the environment's page."""
    kind, _, name = environment.partition(".")
    return f"/flight/{name}/wrapper.html" if kind == "flight" else f"/miniwob/{environment}.html"


def can_reuse_page(environment: str) -> bool:
    """Whether a used page of the environment can be started anew and is then like a fresh one."""
    return environment not in STATEFUL_ENVIRONMENTS and not environment.startswith("flight.")


def start_arguments(environment: str, seed: int) -> dict[str, object]:
    """What START needs to know."""
    return {"seed": seed, "today": FIXED_DATE, "unfoldingMs": STARTUP_ANIMATION_MS.get(environment, 0)}
