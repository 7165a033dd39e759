"""Tasks of the wiki."""

from __future__ import annotations

import random

from megatron_webrl.tasks.sites.goal import Fact, Goal, make_environments
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, SubmitForm, next_link, next_unvisited
from megatron_webrl.tasks.sites.markup import page_count
from megatron_webrl.tasks.sites.wiki import (
    NUMERIC_FACTS,
    REVISIONS_PER_PAGE,
    Article,
    Revision,
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
        facts=(Fact(f"The article on {town.title} gives {town.fact(label)} under {label}.", (article_path(town),)),),
    )


def watch(rng: random.Random, data: WikiData) -> Goal:
    article = rng.choice(list(data.articles.values()))
    listing = category_path(article.category)
    return Goal(
        f"Watch the article on {article.title}.",
        listing,
        lambda app, view: next_link(view, listing, article_path(article)) or SubmitForm(f"/watch/{article.slug}"),
        effects=(("watch", article.slug),),
        facts=(Fact(f"The wiki confirms that the article on {article.title} is on the watchlist."),),
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
        facts=(
            *(Fact(f"{town.title}: {label} {town.fact(label)}.", (article_path(town),)) for town in towns),
            Fact(f"{best.title} has {words}."),
        ),
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
        facts=(
            Fact(f"The mouth of the {river.title} is at {town.title}.", (article_path(river),)),
            Fact(f"The mayor of {town.title} is {mayor.title}.", (article_path(town), article_path(mayor))),
            Fact(f"{mayor.title} was born in {mayor.fact('Birthplace')}.", (article_path(mayor),)),
            Fact(f"The answer is {mayor.fact('Birthplace')}."),
        ),
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
        facts=(
            Fact(f"The wiki confirms a change of the article on {town.title}."),
            Fact(f"The change is of {label}."),
            Fact(f'The value is "{value}".'),
            Fact(f'The summary is "{summary}".'),
            Fact("Nothing else has been changed."),
        ),
    )


def count_edits(rng: random.Random, data: WikiData) -> Goal:
    article = rng.choice([a for a in data.articles.values() if len(a.history) > REVISIONS_PER_PAGE])
    editor = rng.choice(article.history).editor
    count = str(sum(revision.editor == editor for revision in article.history))
    pages = page_count(len(article.history), REVISIONS_PER_PAGE)
    history = tuple(history_path(article, page) for page in range(1, pages + 1))
    path = (*_path_to(article), *history)
    found = [(page, revision.number) for page, revision in _paged(article, history) if revision.editor == editor]
    return Goal(
        f"How many revisions of the article on {article.title} are by {editor}? Answer with the number.",
        "/",
        lambda app, view: next_unvisited(app.visited_paths, view, *path) or GiveAnswer(count),
        answer=count,
        facts=(
            *(Fact(f"Revision {number} of {article.title} is by {editor}.", (page,)) for page, number in found),
            *(Fact(f"{page} lists no revision by {editor}.", (page,)) for page in history if page not in dict(found)),
            Fact(f"The revisions by {editor} are {count}."),
        ),
    )


def _paged(article: Article, pages: tuple[str, ...]) -> list[tuple[str, Revision]]:
    """The page that lists each revision."""
    return [(pages[index // REVISIONS_PER_PAGE], revision) for index, revision in enumerate(article.history)]


def _path_to(article: Article) -> tuple[str, ...]:
    return ("/", category_path(article.category), article_path(article))


ENVIRONMENTS = make_environments(
    Wiki, generate_data, easy=(look_up, watch), medium=(compare_towns, birthplace), hard=(correct_fact, count_edits)
)
