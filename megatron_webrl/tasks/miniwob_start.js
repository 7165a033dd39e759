// Dates are shifted, not stopped, because pages measure time with them. The style hides the reward panel and the click
// trace, which would leak into the screenshot, and the START cover, which would hide the last state of the page. The
// page's time limit is disabled: episodes are limited in steps, and the countdown would change the page every second.
// `episodeRuns` distinguishes an episode from a page that was only reloaded.
async ({seed, today, unfoldingMs}) => {
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
      jQuery(":animated").finish();  // else the calendar would hide once it has unfolded
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
}
