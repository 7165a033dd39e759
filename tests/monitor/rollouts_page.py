"""The page of rollouts of a whole job, from the job's own monitor, in real Chromium."""

from __future__ import annotations

from playwright.sync_api import sync_playwright

from megatron_webrl.browser.chromium import find_chromium, use_sandbox

MILLISECONDS = 60_000
TRIES = 60
STATES_SEEN = """
(count) => {
  window.seen ??= new Set();
  for (const each of document.querySelectorAll(".states button")) {
    if (each.querySelector(".count").innerText !== "0") window.seen.add(each.querySelector(".swatch").innerText);
  }
  return window.seen.size >= count;
}
"""


def check_rollouts_page(address: str, token: str) -> None:
    """The page shows the job's rollouts in several states, and the steps of one that runs."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), chromium_sandbox=use_sandbox())
        page = browser.new_page()
        page.set_default_timeout(MILLISECONDS)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{address}/?token={token}")
        page.get_by_role("link", name="Rollouts").click()
        page.wait_for_function(STATES_SEEN, arg=3)
        for _ in range(TRIES):  # a rollout may end before its worker has heard that someone looks at it
            page.get_by_text("rollouts shown").wait_for()
            page.locator(".wall").focus()
            page.keyboard.press("Enter")
            page.locator("main img").or_(page.get_by_text("This rollout has ended")).first.wait_for()
            if page.locator("main img").count():
                break
            page.get_by_role("link", name="Rollouts", exact=True).click()
        page.locator("main img").first.wait_for()
        assert page.locator("dl.facts").inner_text()
        assert not problems
        browser.close()
