"""Tasks of the offline websites with their scripts: those of the sites, and questions.

Most questions are answered by the page on which they begin, with yes or no, equally often, or a small number: an agent
that cannot read yet is right now and then.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from megatron_webrl.tasks.sites.app import App, page_count
from megatron_webrl.tasks.sites.calendar import Appointment, CalendarData, week_path
from megatron_webrl.tasks.sites.content_generator import sign_in_instruction
from megatron_webrl.tasks.sites.forms import FormsData
from megatron_webrl.tasks.sites.forum import THREADS_PER_PAGE, ForumData, board_path, pages_listing
from megatron_webrl.tasks.sites.goal import DrawGoal, Fact, Goal, act_unobstructed
from megatron_webrl.tasks.sites.high_level_actions import (
    GiveAnswer,
    HighLevelAction,
    PageLinks,
    next_link,
)
from megatron_webrl.tasks.sites.shop import ITEMS_PER_PAGE, Item, ShopData, category_path, format_price, pages_showing
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS
from megatron_webrl.tasks.sites.websites import Website, get_website
from megatron_webrl.tasks.sites.wiki import Article, WikiData, article_path
from megatron_webrl.tasks.sites.wiki import category_path as wiki_category_path

COMPARED_TOWNS = 6


def _question(words: str, start_path: str, answer: str, fact: str, pages: Sequence[str] = ()) -> Goal:
    """A question that the page at `start_path` answers, and so does each of `pages`."""
    return Goal(
        words,
        start_path,
        lambda app, view: GiveAnswer(answer),
        answer=answer,
        facts=(Fact(fact, tuple(dict.fromkeys((start_path, *pages)))),),
    )


def _yes_no(words: str, start_path: str, yes: bool, fact: str, pages: Sequence[str] = ()) -> Goal:
    return _question(f"{words} Answer yes or no.", start_path, "yes" if yes else "no", fact, pages)


def _near(rng: random.Random, value: int, spread: int) -> int:
    """A whole number at least 1 that differs from `value`, as often below it as above it."""
    distance = rng.randint(1, spread)
    below = rng.random() < 0.5 and value > distance
    return value - distance if below else value + distance


# Shop


def is_in_stock(rng: random.Random, data: ShopData) -> Goal:
    wanted = rng.random() < 0.5
    item = rng.choice([item for item in data.items if item.in_stock == wanted] or data.items)
    stock = "in stock" if item.in_stock else "sold out"
    return _yes_no(
        f'Is the "{item.name}" in stock?', _shop_listing(data, item), item.in_stock,
        f'The "{item.name}" is {stock}.', pages_showing(data, item),
    )  # fmt: skip


def costs_more(rng: random.Random, data: ShopData) -> Goal:
    item = rng.choice(data.items)
    limit = _near(rng, item.price // 100, 12)
    return _yes_no(
        f'Does the "{item.name}" cost more than ${limit}?', _shop_listing(data, item), item.price > limit * 100,
        f'The "{item.name}" costs {format_price(item.price)}.', pages_showing(data, item),
    )  # fmt: skip


def count_sold_out(rng: random.Random, data: ShopData) -> Goal:
    category = rng.choice(data.categories)
    items = data.items_in_category(category)
    page = rng.randint(1, page_count(len(items), ITEMS_PER_PAGE))
    shown = items[(page - 1) * ITEMS_PER_PAGE : page * ITEMS_PER_PAGE]
    count, path = sum(not item.in_stock for item in shown), category_path(category, page=page)
    return _question(
        f"How many of the items on page {page} of the category {category}, in featured order, are sold out? "
        "Answer with the number.",
        path, str(count), f"{count} of the items on page {page} of the category {category} are sold out.",
    )  # fmt: skip


def _shop_listing(data: ShopData, item: Item) -> str:
    index = data.items_in_category(item.category).index(item)
    return category_path(item.category, page=index // ITEMS_PER_PAGE + 1)


# Forum


def has_more_replies(rng: random.Random, data: ForumData) -> Goal:
    thread = rng.choice([thread for threads in list(data.boards.values())[:3] for thread in threads])
    replies, pages = len(thread.posts) - 1, pages_listing(data, thread)
    limit = _near(rng, replies, 3)
    return _yes_no(
        f'Does the thread "{thread.title}" have more than {limit} replies?', pages[0], replies > limit,
        f'The thread "{thread.title}" has {replies} replies.', pages,
    )  # fmt: skip


def is_started_by(rng: random.Random, data: ForumData) -> Goal:
    thread = rng.choice([thread for threads in list(data.boards.values())[:3] for thread in threads])
    author, pages = thread.posts[0].author, pages_listing(data, thread)
    asked = author if rng.random() < 0.5 else rng.choice([name for name in data.members if name != author])
    return _yes_no(
        f'Did {asked} start the thread "{thread.title}"?', pages[0], asked == author,
        f'{author} started the thread "{thread.title}".', pages,
    )  # fmt: skip


def count_started(rng: random.Random, data: ForumData) -> Goal:
    board = rng.choice(list(data.boards)[:3])
    page = rng.randint(1, page_count(len(data.boards[board]), THREADS_PER_PAGE))
    shown = data.boards[board][(page - 1) * THREADS_PER_PAGE : page * THREADS_PER_PAGE]
    author = rng.choice(sorted(data.members))
    count = sum(thread.posts[0].author == author for thread in shown)
    return _question(
        f"How many of the threads on page {page} of the board {board} were started by {author}? "
        "Answer with the number.",
        board_path(board, page), str(count), f"{author} started {count} of the threads on page {page} of {board}.",
    )  # fmt: skip


# Calendar


def begins_before(rng: random.Random, data: CalendarData) -> Goal:
    event = rng.choice(data.appointments)
    hour = _near(rng, event.start.hour, 3)
    return _yes_no(
        f'Does the "{event.title}" begin before {hour:02d}:00?', _week_of(event), event.start.hour < hour,
        f'The "{event.title}" begins at {event.start:%H:%M}.', (f"/event/{event.id}",),
    )  # fmt: skip


def is_on_weekday(rng: random.Random, data: CalendarData) -> Goal:
    event = rng.choice(data.appointments)
    days = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
    own = days[event.start.weekday()]
    asked = own if rng.random() < 0.5 else rng.choice([day for day in days if day != own])
    return _yes_no(
        f'Is the "{event.title}" on a {asked}?', _week_of(event), asked == own,
        f'The "{event.title}" is on a {own}.', (f"/event/{event.id}",),
    )  # fmt: skip


def count_on_day(rng: random.Random, data: CalendarData) -> Goal:
    event = rng.choice(data.appointments)
    day = event.start.date()
    count = len(data.appointments_on(day))
    return _question(
        f"How many appointments are there on {day.isoformat()}? Answer with the number.",
        _week_of(event), str(count), f"There are {count} appointments on {day.isoformat()}.",
    )  # fmt: skip


def _week_of(event: Appointment) -> str:
    return week_path(event.start.date())


# Wiki


def has_more_people(rng: random.Random, data: WikiData) -> Goal:
    town = rng.choice(data.articles_in("Towns"))
    people = int(town.fact("Population").replace(",", ""))
    limit = _near(rng, people // 100, 40) * 100
    return _yes_no(
        f"Does {town.title} have more than {limit:,} inhabitants?", article_path(town), people > limit,
        f"The population of {town.title} is {people:,}.",
    )  # fmt: skip


def is_founded_before(rng: random.Random, data: WikiData) -> Goal:
    town = rng.choice(data.articles_in("Towns"))
    founded = int(town.fact("Founded"))
    year = _near(rng, founded, 90)
    return _yes_no(
        f"Was {town.title} founded before {year}?", article_path(town), founded < year,
        f"{town.title} was founded in {founded}.",
    )  # fmt: skip


def is_mayor(rng: random.Random, data: WikiData) -> Goal:
    town, people = rng.choice(data.articles_in("Towns")), [article.title for article in data.articles_in("People")]
    mayor = town.fact("Mayor")
    asked = mayor if rng.random() < 0.5 else rng.choice([name for name in people if name != mayor])
    return _yes_no(
        f"Is {asked} the mayor of {town.title}?", article_path(town), asked == mayor,
        f"The mayor of {town.title} is {mayor}.", (article_path(data.articles[mayor]),),
    )  # fmt: skip


def oldest_of_six(rng: random.Random, data: WikiData) -> Goal:
    towns = rng.sample(data.articles_in("Towns"), COMPARED_TOWNS)
    oldest = min(towns, key=lambda town: int(town.fact("Founded")))
    listed = ", ".join(town.title for town in towns[:-1])

    def next_town(visited: set[str]) -> Article | None:
        return next((town for town in towns if article_path(town) not in visited), None)

    return Goal(
        f"Which of the towns {listed} and {towns[-1].title} was founded first? Answer with its name.",
        "/",
        lambda app, view: (
            (
                next_link(view, "/", wiki_category_path("Towns"), article_path(town))
                if (town := next_town(app.visited_paths))
                else None
            )
            or GiveAnswer(oldest.title)
        ),
        answer=oldest.title,
        facts=(
            *(Fact(f"{town.title} was founded in {town.fact('Founded')}.", (article_path(town),)) for town in towns),
            Fact(f"{oldest.title} was founded first."),
        ),
    )


# City service desk


def fee_is_above(rng: random.Random, data: FormsData) -> Goal:
    service = rng.choice(data.services)
    limit = _near(rng, service.fee, 30)
    return _yes_no(
        f'Does the service "{service.title}" cost more than ${limit}?', f"/service/{service.slug}", service.fee > limit,
        f'The fee of the service "{service.title}" is ${service.fee}.',
    )  # fmt: skip


def is_decided_within(rng: random.Random, data: FormsData) -> Goal:
    service = rng.choice(data.services)
    limit = _near(rng, service.days, 15)
    return _yes_no(
        f'Is the service "{service.title}" decided within {limit} days or fewer?', f"/service/{service.slug}",
        service.days <= limit, f'The service "{service.title}" is decided within {service.days} days.',
    )  # fmt: skip


def belongs_to_office(rng: random.Random, data: FormsData) -> Goal:
    service, offices = rng.choice(data.services), sorted({service.office for service in data.services})
    other = rng.choice([office for office in offices if office != service.office])
    asked = service.office if rng.random() < 0.5 else other
    return _yes_no(
        f'Is the service "{service.title}" one of the {asked}?', f"/service/{service.slug}", asked == service.office,
        f'The service "{service.title}" is one of the {service.office}.',
    )  # fmt: skip


QUESTIONS: Mapping[str, tuple[DrawGoal, ...]] = {
    "shop": (is_in_stock, costs_more, count_sold_out),
    "forum": (has_more_replies, is_started_by, count_started),
    "calendar": (begins_before, is_on_weekday, count_on_day),
    "wiki": (has_more_people, is_founded_before, is_mayor, oldest_of_six),
    "forms": (fee_is_above, is_decided_within, belongs_to_office),
}
"""Kinds of questions by site."""


DONE_ANSWER = "done"  # of tasks that ask for effects
DRAWS_PER_KIND = 2
# Kinds that differ from the rest in what they assume: these are orders of someone who is signed out at the start.
_SIGNED_OUT_KINDS = ("shop-buy-item", "shop-order-list")


@dataclass(frozen=True)
class WebsiteGoal:
    """One task of a website. Its instruction names the host; its script ends with an answer."""

    host: str
    kind: str  # such as "shop-find-price"
    goal: Goal

    @property
    def url(self) -> str:
        """Address of the start page."""
        return f"http://{self.host}{self.goal.start_path}"

    @property
    def answer(self) -> str:
        """The text that the agent must answer with."""
        return self.goal.answer if self.goal.answer is not None else DONE_ANSWER


@lru_cache(maxsize=256)
def website_goals(host: str) -> Mapping[str, WebsiteGoal]:
    """The tasks of a host by instruction, of kinds that name facts. Raises KeyError for a host without a website."""
    website = get_website(host)
    goals: dict[str, WebsiteGoal] = {}
    for kind, needs_login, draw_goal in _kinds(website.app_class):
        if kind in _SIGNED_OUT_KINDS and website.start.signed_in:
            continue
        for number in range(DRAWS_PER_KIND):
            drawn = draw_goal(random.Random(f"offline/{host}/{kind}/{number}"), website.data)
            if drawn is not None and drawn.facts:
                goal = _for_website(website, drawn, needs_login or drawn.signed_in)
                goals.setdefault(goal.instruction, WebsiteGoal(host, kind, goal))
    return goals


def _kinds(app_class: type[App]) -> Iterator[tuple[str, bool, DrawGoal]]:
    """Name, whether sign-in is needed, and how to draw a goal."""
    for name, environment in ENVIRONMENTS.items():
        if environment.app_class is app_class:
            yield name, environment.difficulty == "hard", environment.draw_goal
    for draw_goal in QUESTIONS[app_class.name]:
        name = f"{app_class.name}-{draw_goal.__name__.replace('_', '-')}"
        yield name, app_class.login_required, draw_goal


def _for_website(website: Website, goal: Goal, needs_login: bool) -> Goal:
    """The goal with a whole instruction, and a script that copes with the website's initial state."""
    needs_login = needs_login and not website.start.signed_in
    parts = [
        f"On {website.host}:",
        sign_in_instruction(website.data.account) if needs_login else "",
        goal.instruction,
        f'When you are done, answer with "{DONE_ANSWER}".' if goal.effects else "",
    ]
    return replace(
        goal,
        instruction=" ".join(part for part in parts if part),
        scripted_policy=partial(_act, goal, needs_login),
    )


def _act(goal: Goal, needs_login: bool, app: App, view: PageLinks) -> HighLevelAction:
    if goal.effects and Counter(app.effects) == Counter(goal.effects):
        return GiveAnswer(DONE_ANSWER)
    return act_unobstructed(goal.scripted_policy, needs_login, app, view)
