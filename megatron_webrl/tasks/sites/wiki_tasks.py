"""Tasks of the wiki."""

from __future__ import annotations

import random
from functools import partial

from megatron_webrl.tasks.sites.app import InitialSiteState, close_overlay, sign_in
from megatron_webrl.tasks.sites.content_generator import draw_initial_state, sign_in_instruction
from megatron_webrl.tasks.sites.goal import Environment, Goal
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, SubmitForm, next_link, next_unvisited
from megatron_webrl.tasks.sites.markup import page_count
from megatron_webrl.tasks.sites.wiki import (
    NUMERIC_FACTS,
    REVISIONS_PER_PAGE,
    Article,
    Wiki,
    article_path,
    category_path,
    generate_data,
    history_path,
)


def look_up(rng: random.Random) -> Goal:
    world = generate_data(rng)
    town, label = rng.choice(world.articles_in("Towns")), rng.choice(("Population", "Founded", "River", "Mayor"))
    return Goal(
        f"What does the article on {town.title} give under {label}? Answer with that alone.",
        article_path(town),
        partial(Wiki, world, InitialSiteState()),
        lambda app, look: GiveAnswer(town.fact(label)),
        answer=town.fact(label),
    )


def watch(rng: random.Random) -> Goal:
    world = generate_data(rng)
    article = rng.choice(list(world.articles.values()))
    listing = category_path(article.category)
    return Goal(
        f"Watch the article on {article.title}.",
        listing,
        partial(Wiki, world, InitialSiteState(signed_in=True)),
        lambda app, look: next_link(look, listing, article_path(article)) or SubmitForm(f"/watch/{article.slug}"),
        effects=(("watch", article.slug),),
    )


def compare(rng: random.Random) -> Goal:
    world = generate_data(rng)
    towns = rng.sample(world.articles_in("Towns"), 3)
    label, words = rng.choice((("Population", "the most people"), ("Founded", "the longest history"),
                               ("Elevation", "the highest elevation")))  # fmt: skip
    sign = -1 if label == "Founded" else 1
    best = max(towns, key=lambda town: sign * int(town.fact(label).removesuffix(" m").replace(",", "")))
    # Back to the list after each: towns may refer to each other, but need not.
    return Goal(
        f"Which of the towns {towns[0].title}, {towns[1].title} and {towns[2].title} has {words}? "
        "Answer with its name.",
        "/",
        partial(Wiki, world, draw_initial_state(rng)),
        lambda app, look: (
            close_overlay(app)
            or next((
                next_link(look, "/", category_path("Towns"), article_path(town))
                for town in towns if article_path(town) not in app.visited_paths
            ), None)
            or GiveAnswer(best.title)
        ),
        answer=best.title,
    )  # fmt: skip


def birthplace(rng: random.Random) -> Goal:
    world = generate_data(rng)
    river = rng.choice(world.articles_in("Rivers"))
    town = world.articles[river.fact("Mouth")]
    mayor = world.articles[town.fact("Mayor")]
    way = ("/", category_path("Rivers"), *map(article_path, (river, town, mayor)))
    return Goal(
        f"Where was the mayor of the town at the mouth of the {river.title} born? Answer with the name of the place.",
        "/",
        partial(Wiki, world, draw_initial_state(rng)),
        lambda app, look: (
            close_overlay(app) or next_unvisited(app.visited_paths, look, *way) or GiveAnswer(mayor.fact("Birthplace"))
        ),
        answer=mayor.fact("Birthplace"),
    )


def correct_fact(rng: random.Random) -> Goal:
    world = generate_data(rng)
    town = rng.choice(world.articles_in("Towns"))
    number, label = rng.choice([(n, label) for n, (label, _) in enumerate(town.facts) if label in NUMERIC_FACTS])
    value, summary = str(rng.choice(NUMERIC_FACTS[label])), rng.choice(("census", "parish register", "land survey"))
    page = f"{article_path(town)}/edit/{number}"
    way = (*_way(town), f"{article_path(town)}/edit", page)
    return Goal(
        f'{sign_in_instruction(world.account)} In the article on {town.title}, change the value of {label} to "{value}", with '
        f'the summary "{summary}". Change nothing else.',
        "/",
        partial(Wiki, world, draw_initial_state(rng, popup=True)),
        lambda app, look: (
            close_overlay(app)
            or sign_in(app, look)
            or next_link(look, *way)
            or SubmitForm(page, {"value": value, "summary": summary})
        ),
        effects=(("edit", town.slug, label, value, summary),),
    )


def count_edits(rng: random.Random) -> Goal:
    world = generate_data(rng)
    article = rng.choice([a for a in world.articles.values() if len(a.history) > REVISIONS_PER_PAGE])
    editor = rng.choice(article.history).editor
    count = str(sum(revision.editor == editor for revision in article.history))
    pages = page_count(len(article.history), REVISIONS_PER_PAGE)
    way = (*_way(article), *(history_path(article, page) for page in range(1, pages + 1)))
    return Goal(
        f"{sign_in_instruction(world.account)} How many revisions of the article on {article.title} are by {editor}? Answer "
        "with the number.",
        "/",
        partial(Wiki, world, draw_initial_state(rng, popup=True)),
        lambda app, look: (
            close_overlay(app)
            or sign_in(app, look)
            or next_unvisited(app.visited_paths, look, *way)
            or GiveAnswer(count)
        ),
        answer=count,
    )


def _way(article: Article) -> tuple[str, ...]:
    return ("/", category_path(article.category), article_path(article))


ENVIRONMENTS = {
    "wiki-look-up": Environment(Wiki, "easy", look_up),
    "wiki-watch": Environment(Wiki, "easy", watch),
    "wiki-compare-towns": Environment(Wiki, "medium", compare),
    "wiki-birthplace": Environment(Wiki, "medium", birthplace),
    "wiki-correct-fact": Environment(Wiki, "hard", correct_fact),
    "wiki-count-edits": Environment(Wiki, "hard", count_edits),
}
