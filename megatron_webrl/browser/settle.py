"""When a page has come to rest after an action."""

from __future__ import annotations

QUIET_LIMIT_MS = 1000
"""A page that never rests (an animation without end) is taken as it is after so long."""

READY_LIMIT_MS = 10_000
"""A document that is not loaded by then is taken as it is."""

# A blinking caret would make two looks at the same page differ.
STILL_CARET = """
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("* { caret-animation: manual !important; }");
  document.adoptedStyleSheets.push(sheet);
"""

# Resolves to [title, URL] once the document is complete and two animation frames in a row have passed without a
# change of the document or a scroll: the first frame lets handlers run, the second has painted what they did.
# Timers stand in for frames that do not come, such as those of a page that is being replaced.
SETTLE = f"""() => new Promise((resolve) => {{
  const start = performance.now();
  let moved = false, quiet = 0;
  const mark = () => {{ moved = true; }};
  const observer = new MutationObserver(mark);
  observer.observe(document, {{subtree: true, childList: true, attributes: true, characterData: true}});
  addEventListener("scroll", mark, true);
  const finish = () => {{
    observer.disconnect();
    removeEventListener("scroll", mark, true);
    resolve([document.title, location.href]);
  }};
  const next = () => {{
    let called = false;
    const once = () => {{ if (!called) {{ called = true; frame(); }} }};
    requestAnimationFrame(once);
    setTimeout(once, 200);
  }};
  const frame = () => {{
    const ready = document.readyState === "complete";
    const waited = performance.now() - start;
    quiet = ready && !moved ? quiet + 1 : 0;
    moved = false;
    if (quiet >= 2 || waited > (ready ? {QUIET_LIMIT_MS} : {READY_LIMIT_MS})) finish(); else next();
  }};
  next();
}})"""

# How many characters the focused text field holds; null if nothing that takes text has the focus.
FOCUSED_TEXT = """() => {
  let element = document.activeElement;
  while (element && element.shadowRoot && element.shadowRoot.activeElement) element = element.shadowRoot.activeElement;
  if (!element) return null;
  if (element.tagName === "IFRAME") return 1;
  if (element.isContentEditable) return element.textContent.length;
  const plain = ["text", "search", "url", "tel", "email", "password", "number", "date", "time", "month", "week",
                 "datetime-local"];
  const takesText = element.tagName === "TEXTAREA" || (element.tagName === "INPUT" && plain.includes(element.type));
  return takesText && !element.readOnly && !element.disabled ? element.value.length : null;
}"""
