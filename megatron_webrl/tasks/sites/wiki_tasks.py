"""Tasks of the wiki."""

from __future__ import annotations

import random

from megatron_webrl.tasks.sites.goal import Goal, make_environments
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, SubmitForm, next_link, next_unvisited
from megatron_webrl.tasks.sites.markup import page_count
from megatron_webrl.tasks.sites.wiki import (
    NUMERIC_FACTS,
    REVISIONS_PER_PAGE,
    Article,
    Wiki,
    WikiData,
    article_path,
    category_path,
    generate_data,
    history_path,
)


def look_up(rng: random.Random, data: WikiData) -> Goal:
    town, label = rng.choice(data.articles_in("Towns")), rng.choice(("Population", "Founded", "River", "Mayor"))
    return Goal(
        f"What does the article on {town.title} give under {label}? Answer with that alone.",
        article_path(town),
        lambda app, view: GiveAnswer(town.fact(label)),
        answer=town.fact(label),
    )


def watch(rng: random.Random, data: WikiData) -> Goal:
    article = rng.choice(list(data.articles.values()))
    listing = category_path(article.category)
    return Goal(
        f"Watch the article on {article.title}.",
        listing,
        lambda app, view: next_link(view, listing, article_path(article)) or SubmitForm(f"/watch/{article.slug}"),
        effects=(("watch", article.slug),),
        signed_in=True,
    )


def compare_towns(rng: random.Random, data: WikiData) -> Goal:
    towns = rng.sample(data.articles_in("Towns"), 3)
    label, words = rng.choice((("Population", "the most people"), ("Founded", "the longest history"),
                               ("Elevation", "the highest elevation")))  # fmt: skip
    sign = -1 if label == "Founded" else 1
    best = max(towns, key=lambda town: sign * int(town.fact(label).removesuffix(" m").replace(",", "")))
    # Back to the list after each: towns may refer to each other, but need not.
    return Goal(
        f"Which of the towns {towns[0].title}, {towns[1].title} and {towns[2].title} has {words}? "
        "Answer with its name.",
        "/",
        lambda app, view: (
            next((
                next_link(view, "/", category_path("Towns"), article_path(town))
                for town in towns if article_path(town) not in app.visited_paths
            ), None)
            or GiveAnswer(best.title)
        ),
        answer=best.title,
    )  # fmt: skip


def birthplace(rng: random.Random, data: WikiData) -> Goal:
    river = rng.choice(data.articles_in("Rivers"))
    town = data.articles[river.fact("Mouth")]
    mayor = data.articles[town.fact("Mayor")]
    path = ("/", category_path("Rivers"), *map(article_path, (river, town, mayor)))
    return Goal(
        f"Where was the mayor of the town at the mouth of the {river.title} born? Answer with the name of the place.",
        "/",
        lambda app, view: next_unvisited(app.visited_paths, view, *path) or GiveAnswer(mayor.fact("Birthplace")),
        answer=mayor.fact("Birthplace"),
    )


def correct_fact(rng: random.Random, data: WikiData) -> Goal:
    town = rng.choice(data.articles_in("Towns"))
    number, label = rng.choice([(n, label) for n, (label, _) in enumerate(town.facts) if label in NUMERIC_FACTS])
    value, summary = str(rng.choice(NUMERIC_FACTS[label])), rng.choice(("census", "parish register", "land survey"))
    page = f"{article_path(town)}/edit/{number}"
    path = (*_path_to(town), f"{article_path(town)}/edit", page)
    return Goal(
        f'In the article on {town.title}, change the value of {label} to "{value}", with '
        f'the summary "{summary}". Change nothing else.',
        "/",
        lambda app, view: next_link(view, *path) or SubmitForm(page, {"value": value, "summary": summary}),
        effects=(("edit", town.slug, label, value, summary),),
    )


def count_edits(rng: random.Random, data: WikiData) -> Goal:
    article = rng.choice([a for a in data.articles.values() if len(a.history) > REVISIONS_PER_PAGE])
    editor = rng.choice(article.history).editor
    count = str(sum(revision.editor == editor for revision in article.history))
    pages = page_count(len(article.history), REVISIONS_PER_PAGE)
    path = (*_path_to(article), *(history_path(article, page) for page in range(1, pages + 1)))
    return Goal(
        f"How many revisions of the article on {article.title} are by {editor}? Answer with the number.",
        "/",
        lambda app, view: next_unvisited(app.visited_paths, view, *path) or GiveAnswer(count),
        answer=count,
    )


def _path_to(article: Article) -> tuple[str, ...]:
    return ("/", category_path(article.category), article_path(article))


ENVIRONMENTS = make_environments(
    Wiki, generate_data, easy=(look_up, watch), medium=(compare_towns, birthplace), hard=(correct_fact, count_edits)
)
