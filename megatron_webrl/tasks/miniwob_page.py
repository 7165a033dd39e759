"""Pages of MiniWoB++: their names, and the scripts that start an episode and read its result."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from megatron_webrl.config.setting import ConfigError

UNSUPPORTED_ENVIRONMENTS = {"hover-shape": "its page never gives a reward and never ends"}  # reason by environment

STATEFUL_ENVIRONMENTS = frozenset({
    "book-flight", "book-flight-nodelay", "copy-paste", "copy-paste-2", "scroll-text", "scroll-text-2",
    "use-colorwheel", "use-colorwheel-2", "chase-circle", "drag-cube", "moving-items", "simon-says", "stock-market",
    "terminal",
})  # fmt: skip
"""Their restarted page may differ from a new one: scroll positions and open widgets stay, or animations continue."""

FIXED_DATE = "2025-01-01T12:00:00Z"  # on all pages: some show it or a calendar of it; later than any date in a task
STARTUP_ANIMATION_MS = {"click-pie": 3000}  # maximum, where a session does not wait long enough for a page's animation

# Dates are shifted, not stopped, because pages measure time with them. The style hides the reward panel and the click
# trace, which would leak into the screenshot, and the START cover, which would hide the last state of the page. The
# page's time limit is disabled: episodes are limited in steps, and the countdown would change the page every second.
# `episodeRuns` distinguishes an episode from a page that was only reloaded.
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
    if (window.jQuery?.datepicker) {
      jQuery.fx.off = true;
      jQuery(".hasDatepicker").datepicker("hide").datepicker("setDate", null);
      jQuery.fx.off = false;
    }
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

IS_STARTED_SCRIPT = "() => Boolean(window.episodeRuns)"  # whether an episode was started since the page was loaded

# The raw reward, without the page's reduction by elapsed time.
RESULT_SCRIPT = """() => window.episodeRuns && WOB_DONE_GLOBAL ? [WOB_RAW_REWARD_GLOBAL, true] : [null, false]"""


def pages_folder() -> Path:
    """The folder of pages in the package. Raises ConfigError if MiniWoB++ is not installed."""
    # The package is not imported: that would import selenium and gymnasium, which are not needed.
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("tasks.source=miniwob needs the package miniwob; install it with pip install miniwob==1.1.0")
    return Path(spec.submodule_search_locations[0]) / "html"


def all_environments(folder: Path | None = None) -> list[str]:
    """Sorted names of all supported environments of the installed package; its flight pages are flight.<page>."""
    pages = folder or pages_folder()
    names = [file.stem for file in (pages / "miniwob").glob("*.html")]
    names += [f"flight.{file.parent.name}" for file in (pages / "flight").glob("*/wrapper.html")]
    return sorted(set(names) - set(UNSUPPORTED_ENVIRONMENTS))


def check_supported(names: Iterable[str]) -> None:
    """Raises ConfigError for an unsupported environment."""
    for name in names:
        if name in UNSUPPORTED_ENVIRONMENTS:
            raise ConfigError(
                f"tasks.environments: {name} cannot be used: {UNSUPPORTED_ENVIRONMENTS[name]}; leave it out"
            )


def page_path(environment: str) -> str:
    kind, _, name = environment.partition(".")
    return f"/flight/{name}/wrapper.html" if kind == "flight" else f"/miniwob/{environment}.html"


def can_reuse_page(environment: str) -> bool:
    """Whether a restarted page of the environment is like a new one."""
    return environment not in STATEFUL_ENVIRONMENTS and not environment.startswith("flight.")


def start_arguments(environment: str, seed: int) -> dict[str, object]:
    """The argument of START_SCRIPT."""
    return {"seed": seed, "today": FIXED_DATE, "unfoldingMs": STARTUP_ANIMATION_MS.get(environment, 0)}
