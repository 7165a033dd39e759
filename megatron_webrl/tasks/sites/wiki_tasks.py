"""Tasks of the wiki."""

from __future__ import annotations

import random
from functools import partial

from megatron_webrl.tasks.sites.app import Start, clear_way, sign_in
from megatron_webrl.tasks.sites.goal import Environment, Goal
from megatron_webrl.tasks.sites.markup import pages_of
from megatron_webrl.tasks.sites.moves import Answer, Submit, tour, walk
from megatron_webrl.tasks.sites.wiki import (
    FACTS,
    REVISIONS_PER_PAGE,
    Article,
    Wiki,
    article_path,
    category_path,
    history_path,
    make_world,
)
from megatron_webrl.tasks.sites.words import credentials, obstacles


def look_up(rng: random.Random) -> Goal:
    world = make_world(rng)
    town, label = rng.choice(world.of("Towns")), rng.choice(("Population", "Founded", "River", "Mayor"))
    return Goal(
        f"What does the article on {town.title} give under {label}? Answer with that alone.",
        article_path(town),
        partial(Wiki, world, Start()),
        lambda app, look: Answer(town.fact(label)),
        answer=town.fact(label),
    )


def watch(rng: random.Random) -> Goal:
    world = make_world(rng)
    article = rng.choice(list(world.articles.values()))
    listing = category_path(article.category)
    return Goal(
        f"Watch the article on {article.title}.",
        listing,
        partial(Wiki, world, Start(signed_in=True)),
        lambda app, look: walk(look, listing, article_path(article)) or Submit(f"/watch/{article.slug}"),
        effects=(("watch", article.slug),),
    )


def compare(rng: random.Random) -> Goal:
    world = make_world(rng)
    towns = rng.sample(world.of("Towns"), 3)
    label, words = rng.choice((("Population", "the most people"), ("Founded", "the longest history"),
                               ("Elevation", "the highest elevation")))  # fmt: skip
    sign = -1 if label == "Founded" else 1
    best = max(towns, key=lambda town: sign * int(town.fact(label).removesuffix(" m").replace(",", "")))
    # Back to the list after each: towns may refer to each other, but need not.
    return Goal(
        f"Which of the towns {towns[0].title}, {towns[1].title} and {towns[2].title} has {words}? "
        "Answer with its name.",
        "/",
        partial(Wiki, world, obstacles(rng)),
        lambda app, look: (
            clear_way(app)
            or next((
                walk(look, "/", category_path("Towns"), article_path(town))
                for town in towns if article_path(town) not in app.seen
            ), None)
            or Answer(best.title)
        ),
        answer=best.title,
    )  # fmt: skip


def birthplace(rng: random.Random) -> Goal:
    world = make_world(rng)
    river = rng.choice(world.of("Rivers"))
    town = world.articles[river.fact("Mouth")]
    mayor = world.articles[town.fact("Mayor")]
    way = ("/", category_path("Rivers"), *map(article_path, (river, town, mayor)))
    return Goal(
        f"Where was the mayor of the town at the mouth of the {river.title} born? Answer with the name of the place.",
        "/",
        partial(Wiki, world, obstacles(rng)),
        lambda app, look: clear_way(app) or tour(app.seen, look, *way) or Answer(mayor.fact("Birthplace")),
        answer=mayor.fact("Birthplace"),
    )


def correct_fact(rng: random.Random) -> Goal:
    world = make_world(rng)
    town = rng.choice(world.of("Towns"))
    number, label = rng.choice([(n, label) for n, (label, _) in enumerate(town.facts) if label in FACTS])
    value, summary = str(rng.choice(FACTS[label])), rng.choice(("census", "parish register", "land survey"))
    page = f"{article_path(town)}/edit/{number}"
    way = (*_way(town), f"{article_path(town)}/edit", page)
    return Goal(
        f'{credentials(world.account)} In the article on {town.title}, change the value of {label} to "{value}", with '
        f'the summary "{summary}". Change nothing else.',
        "/",
        partial(Wiki, world, obstacles(rng, popup=True)),
        lambda app, look: (
            clear_way(app)
            or sign_in(app, look)
            or walk(look, *way)
            or Submit(page, {"value": value, "summary": summary})
        ),
        effects=(("edit", town.slug, label, value, summary),),
    )


def count_edits(rng: random.Random) -> Goal:
    world = make_world(rng)
    article = rng.choice([a for a in world.articles.values() if len(a.history) > REVISIONS_PER_PAGE])
    editor = rng.choice(article.history).editor
    count = str(sum(revision.editor == editor for revision in article.history))
    pages = pages_of(len(article.history), REVISIONS_PER_PAGE)
    way = (*_way(article), *(history_path(article, page) for page in range(1, pages + 1)))
    return Goal(
        f"{credentials(world.account)} How many revisions of the article on {article.title} are by {editor}? Answer "
        "with the number.",
        "/",
        partial(Wiki, world, obstacles(rng, popup=True)),
        lambda app, look: clear_way(app) or sign_in(app, look) or tour(app.seen, look, *way) or Answer(count),
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
