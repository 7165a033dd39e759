"""Rows of task files about offline websites, in WebGym's format, and what is true of them."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_webrl.tasks.sites.app import format_date
from megatron_webrl.tasks.sites.questions import WebsiteGoal, website_goals
from megatron_webrl.tasks.sites.websites import (
    DENYING_NUMBERS,
    MOODY_NUMBERS,
    effects_digest,
    page_key_of_path,
    website_host,
)
from megatron_webrl.tasks.web import SOURCE_NAME
from megatron_webrl.types import RubricFact, Task

BENCHMARK = "Offline websites"
DOMAINS = {
    "shop": "Shopping", "forum": "Community", "calendar": "Productivity", "wiki": "Reference", "forms": "Government",
}  # fmt: skip
FILES = ("train", "test")
NUMBERS = {  # of ordinary, denying and moody websites: files share none
    "train": (range(0, 6_000), DENYING_NUMBERS[:250], MOODY_NUMBERS[:250]),
    "test": (range(6_000, 9_000), DENYING_NUMBERS[250:], MOODY_NUMBERS[250:]),
}
LEVELS = ("easy", "medium", "hard")
SHARES = {"easy": 0.6, "medium": 0.25, "hard": 0.15}
TASKS_PER_WEBSITE = 3  # on average
UNUSUAL_EVERY = 20  # one task in so many is of a denying website, and one of a moody one
MAX_EXTRA_WEBSITES = 1000


@dataclass(frozen=True)
class FactTruth:
    """A fact of the rubric, and the keys of the pages of which each shows it; none: it follows from the others."""

    text: str
    pages: tuple[str, ...]


@dataclass(frozen=True)
class TaskTruth:
    """What is true of one task."""

    task_id: str
    file: str
    kind: str
    host: str
    instruction: str
    answers: tuple[str, ...]  # forms of the right answer
    effects: int  # digest of the wanted effects; 0: none
    facts: tuple[FactTruth, ...]

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> TaskTruth:
        facts = tuple(FactTruth(fact["text"], tuple(fact["pages"])) for fact in row["facts"])
        return cls(**row | {"answers": tuple(row["answers"]), "facts": facts})


def level_of(facts: int) -> str:
    """The difficulty that a number of facts stands for."""
    return LEVELS[0] if facts <= 3 else LEVELS[1] if facts <= 6 else LEVELS[2]


def draw_goals(file: str, count: int, rng: random.Random) -> list[WebsiteGoal]:
    """`count` tasks for a file: sites in turn, difficulties by their shares, kinds evenly; no instruction twice."""
    ordinary, denying, moody = NUMBERS[file]
    pools: dict[tuple[str, range], list[str]] = defaultdict(list)
    levels = [level for level in LEVELS for _ in range(round(count * SHARES[level]))]
    levels = (levels + [LEVELS[0]] * count)[:count]
    rng.shuffle(levels)
    chosen: dict[str, WebsiteGoal] = {}
    for number, level in enumerate(levels):
        site = list(DOMAINS)[number % len(DOMAINS)]
        turn = number % UNUSUAL_EVERY - number // UNUSUAL_EVERY % len(DOMAINS)  # of every site in time
        numbers = denying if turn == 0 else moody if turn == UNUSUAL_EVERY // 2 else ordinary
        pool = pools[site, numbers]
        wanted_size = count // (len(DOMAINS) * TASKS_PER_WEBSITE) + 1 if numbers is ordinary else 1
        goal = _draw_goal(site, level, numbers, pool, wanted_size, chosen, rng)
        chosen[goal.goal.instruction] = goal
    return list(chosen.values())


def _draw_goal(
    site: str, level: str, numbers: range, pool: list[str], wanted_size: int, chosen: dict[str, WebsiteGoal],
    rng: random.Random,
) -> WebsiteGoal:  # fmt: skip
    """A goal of a level that is not chosen yet, of a website of the pool, which grows where it has none."""
    while len(pool) < wanted_size:
        pool.append(website_host(site, rng.choice(numbers)))
    hosts = rng.sample(pool, len(pool))
    for _ in range(MAX_EXTRA_WEBSITES):
        for host in hosts:
            by_kind: dict[str, list[WebsiteGoal]] = defaultdict(list)
            for goal in website_goals(host).values():
                if level_of(len(goal.goal.facts)) == level and goal.goal.instruction not in chosen:
                    by_kind[goal.kind].append(goal)
            if by_kind:
                return rng.choice(by_kind[rng.choice(sorted(by_kind))])
        hosts = [website_host(site, rng.choice(numbers))]
        pool += hosts
    raise ValueError(f"no more {level} tasks of {site} after {MAX_EXTRA_WEBSITES} further websites; ask for fewer")


def task_row(goal: WebsiteGoal) -> dict[str, Any]:
    """A task as a row of WebGym's format."""
    groups = []
    for number, (shown, facts) in enumerate(groupby(goal.goal.facts, key=lambda fact: bool(fact.shown_on)), 1):
        description = "What pages of the website show" if shown else "What follows"
        if goal.goal.effects:
            description = "What has been done on the website"
        groups.append({"id": str(number), "description": description, "facts": [fact.text for fact in facts]})
    return {
        "benchmark_name": BENCHMARK,
        "task_name": goal.goal.instruction,
        "domain": DOMAINS[goal.kind.partition("-")[0]],
        "subdomain": goal.kind,
        "website": goal.url,
        "definite_answer": goal.answer,
        "task_id": task_id(goal),
        "difficulty": len(goal.goal.facts),
        "evaluator_reference": groups,
    }


def task_id(goal: WebsiteGoal) -> str:
    """Such as offline/shop-17/4: the number is the task's place among those of its website."""
    place = list(website_goals(goal.host)).index(goal.goal.instruction)
    return f"offline/{goal.host.removesuffix('.localhost')}/{place}"


def truth_of(goal: WebsiteGoal, file: str) -> TaskTruth:
    """What is true of a task."""
    facts = tuple(
        FactTruth(fact.text, tuple(dict.fromkeys(page_key_of_path(goal.host, path) for path in fact.shown_on)))
        for fact in goal.goal.facts
    )
    return TaskTruth(
        task_id(goal), file, goal.kind, goal.host, goal.goal.instruction, answer_forms(goal.answer),
        effects_digest(goal.goal.effects), facts,
    )  # fmt: skip


def answer_forms(answer: str) -> tuple[str, ...]:
    """The answer, and for a date also its form in words."""
    try:
        return answer, format_date(date.fromisoformat(answer))
    except ValueError:
        return (answer,)


def write_lines(path: Path, rows: Iterator[Any] | Sequence[Any]) -> None:
    """Write JSON lines. Raises OSError."""
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def read_truth(path: Path) -> list[TaskTruth]:
    """The truth of a task folder, or of its file truth.jsonl. Raises OSError."""
    file = path / "truth.jsonl" if path.is_dir() else path
    return [TaskTruth.from_json(json.loads(line)) for line in file.read_text().splitlines()]


def truth_row(truth: TaskTruth) -> dict[str, Any]:
    return asdict(truth)


def read_tasks(folder: Path) -> dict[str, tuple[Task, WebsiteGoal]]:
    """The tasks of a folder by id, each with its goal. Step limits are 0. Raises OSError, KeyError (other tasks)."""
    tasks = {}
    for file in FILES:
        for line in (folder / f"{file}.jsonl").read_text().splitlines():
            row = json.loads(line)
            host = urlsplit(row["website"]).hostname or ""
            facts = tuple(
                RubricFact(group["id"], group["description"], fact)
                for group in row["evaluator_reference"] for fact in group["facts"]
            )  # fmt: skip
            task = Task(
                id=row["task_id"], source=SOURCE_NAME, environment=row["domain"].lower(), seed=0, max_steps=0,
                instruction=row["task_name"], difficulty=level_of(row["difficulty"]), answer=row["definite_answer"],
                url=row["website"], website=host, benchmark=row["benchmark_name"], domain=row["domain"],
                subdomain=row["subdomain"], fact_count=row["difficulty"], facts=facts,
            )  # fmt: skip
            tasks[task.id] = task, website_goals(host)[row["task_name"]]
    return tasks
