"""A trajectory as one HTML file: each screenshot with its action drawn in, next to the response."""

from __future__ import annotations

import html
from collections.abc import Callable

import numpy as np

from megatron_webrl.types import COORDINATE_RANGE, Step, Trajectory, Verdict
from megatron_webrl.util.image_type import data_url

# The page shows texts and images of web pages; it runs no script and loads nothing.
CONTENT_POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'\">"
)
STYLE = """
h1 { font-size: 1.4rem; }
body { font: 14px/1.4 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2430; }
.step { display: flex; gap: 1.5rem; border-top: 1px solid #d5dbe3; padding: 1rem 0; }
.shot { position: relative; flex: none; } .shot img { display: block; max-width: 26rem; border: 1px solid #d5dbe3; }
.mark { position: absolute; width: 14px; height: 14px; margin: -8px; border: 2px solid #e5322d; border-radius: 50%; }
pre { white-space: pre-wrap; background: #f4f6f9; padding: .6rem; margin: 0; }
table { border-collapse: collapse; } td, th { border: 1px solid #d5dbe3; padding: .2rem .5rem; text-align: left; }
.bad { color: #b3261e; } .muted { color: #64707f; }
"""


def trajectory_page(trajectory: Trajectory, decode: Callable[[np.ndarray], str]) -> str:
    """The page of a trajectory. `decode` turns token ids into text."""
    steps = "\n".join(_step(number, step, trajectory, decode) for number, step in enumerate(trajectory.steps, 1))
    title = f"{trajectory.task.environment}: {trajectory.instruction}"
    facts = (
        f"{trajectory.outcome}, reward {trajectory.reward:g}, {len(trajectory.steps)} steps, "
        f"{trajectory.seconds:.1f} s, ticket {trajectory.ticket}"
    )
    return (
        f'<!doctype html><meta charset="utf-8">{CONTENT_POLICY}<title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style>"
        f'<h1>{html.escape(title)}</h1><p class="muted">{html.escape(facts)}</p>{_verdict(trajectory.verdict)}\n'
        f"{steps}\n{_final_screenshot(trajectory)}"
    )


def _verdict(verdict: Verdict | None) -> str:
    """How the outcome was decided, with the stages of the judge."""
    if verdict is None:
        return ""
    name = (
        f"{verdict.evaluator} ({verdict.protocol}, prompts {verdict.prompts})"
        if verdict.protocol
        else verdict.evaluator
    )
    cost = f"; {verdict.calls} calls, {verdict.dollars:.4f} dollars, {verdict.seconds:.1f} s" if verdict.calls else ""
    rows = "".join(
        f"<tr><td>{html.escape(f'{stage.name} {stage.subject}')}</td><td>{html.escape(stage.decision)}</td>"
        f"<td>{html.escape(stage.text)}</td><td>{html.escape(', '.join(stage.errors))}</td>"
        f"<td>{html.escape(stage.model)}</td><td><code>{html.escape(stage.digest[:12])}</code></td></tr>"
        for stage in verdict.stages
    )
    head = "".join(f"<th>{name}</th>" for name in ("stage", "decision", "reply", "failed tries", "model", "request"))
    table = f"<table><tr>{head}</tr>{rows}</table>" if rows else ""
    facts = f"Verdict: {verdict.outcome} by {name}: {verdict.reason}{cost}"
    return f"<details{' open' if rows else ''}><summary>{html.escape(facts)}</summary>{table}</details>"


def _final_screenshot(trajectory: Trajectory) -> str:
    """The page after the last step, if it is stored."""
    shown = max((int(step.images.max()) for step in trajectory.steps if len(step.images)), default=-1)
    if len(trajectory.images) <= shown + 1:
        return ""
    image = _image(bytes(trajectory.images[-1]))
    return (
        f'<div class="step"><div class="shot">{image}</div><div><p class="muted">After the last step</p></div></div>\n'
    )


def _image(data: bytes) -> str:
    return f'<img src="{data_url(data)}">'


def _step(number: int, step: Step, trajectory: Trajectory, decode: Callable[[np.ndarray], str]) -> str:
    image = ""
    if len(step.images):
        image = _image(bytes(trajectory.images[int(step.images[-1])])) + _mark(step)
    versions = sorted(set(step.versions.tolist()))
    changed = "changed" if step.page_changed else "unchanged"
    facts = f"{len(step.response_token_ids)} tokens, version {', '.join(map(str, versions))}, page {changed}"
    error = f'<p class="bad">{html.escape(step.format_error)}</p>' if step.format_error else ""
    return (
        f'<div class="step"><div class="shot">{image}</div><div><p class="muted">Step {number}: {facts}</p>'
        f"<pre>{html.escape(decode(step.response_token_ids))}</pre>{error}</div></div>"
    )


def _mark(step: Step) -> str:
    if step.action is None or step.action.coordinate is None:
        return ""
    x, y = (value * 100 / COORDINATE_RANGE for value in step.action.coordinate)
    return f'<span class="mark" style="left:{x:.1f}%;top:{y:.1f}%"></span>'
