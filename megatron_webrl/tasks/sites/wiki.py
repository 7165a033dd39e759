"""The offline website wiki and its tasks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta

from megatron_webrl.tasks.server import PageRequest, PageResponse
from megatron_webrl.tasks.sites.app import (
    Account,
    App,
    InitialSiteState,
    build_path,
    form_text,
    matches_query,
    page_count,
    paginate,
    route,
)
from megatron_webrl.tasks.sites.content_generator import (
    TOWN_PREFIXES,
    TOWN_SUFFIXES,
    draw_account,
    draw_names,
    draw_pairs,
    draw_weekday,
)
from megatron_webrl.tasks.sites.goal import Fact, Goal, make_environments
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, SubmitForm, next_link, next_unvisited

ARTICLES_PER_PAGE, REVISIONS_PER_PAGE = 12, 8

_RIVERS = ("Asker", "Belwater", "Clyth", "Dorne", "Eskel", "Fallow", "Glint", "Harrow")
_EDITORS = ("Quillfeather", "MapMaker", "OldStone", "Ferrywoman", "Tidewatcher", "Kestrel9", "Brackish", "InkPot")
_SUMMARIES = (
    "typo", "new source", "wording", "link added", "figure updated", "undo vandalism", "shorter", "picture moved",
)  # fmt: skip
_WORKS = (
    "her maps of the coast", "a cookery book", "songs for the harvest", "the town's first library", "clock making",
)  # fmt: skip
_TRADES = ("salt", "wool", "timber", "slate", "cheese", "boats", "glass", "paper")
NUMERIC_FACTS = {"Population": range(900, 60_000), "Founded": range(1150, 1890), "Elevation": range(3, 700)}
_HEADINGS = ("Early records", "In literature", "Customs", "Weather", "Further reading")
_SENTENCES = (
    "Little is known about the years before the great flood.", "Several travellers mention it in their letters.",
    "The oldest map shows nothing but a chapel and a well.", "Every spring the bells are rung at sunrise.",
    "Winters are mild, and snow seldom stays for long.", "A painting of it hangs in the assembly hall.",
    "Opinions differ on where the name comes from.", "The archive burned twice, so that dates are uncertain.",
    "Its colours are blue and white.", "On the longest day of the year nobody works after noon.",
)  # fmt: skip
_LINK = re.compile(r"\[\[(.*?)\]\]")


@dataclass(frozen=True)
class Revision:
    number: int
    editor: str
    day: date
    summary: str


@dataclass(frozen=True)
class Article:
    """An article; [[Title]] in its texts is a link to another one."""

    slug: str
    title: str
    category: str
    facts: tuple[tuple[str, str], ...]
    paragraphs: tuple[str, ...]
    sections: tuple[tuple[str, str], ...]  # heading and text
    history: tuple[Revision, ...]  # newest first

    def fact(self, label: str) -> str:
        """The value of a fact, without link marks."""
        return _LINK.sub(r"\1", dict(self.facts)[label])


@dataclass(frozen=True)
class WikiData:
    account: Account
    articles: dict[str, Article]  # by title

    def articles_in(self, category: str) -> list[Article]:
        return [self.articles[title] for title in sorted(self.articles) if self.articles[title].category == category]


def generate_data(rng: random.Random) -> WikiData:
    """Draw an island with ten towns, their mayors, and five rivers."""
    towns = draw_pairs(rng, TOWN_PREFIXES, TOWN_SUFFIXES, 10, separator="")
    mayors = dict(zip(towns, draw_names(rng, 10), strict=True))
    mouths = dict(zip(rng.sample(_RIVERS, 5), rng.sample(towns, 5), strict=True))  # town by river
    articles = [
        *_towns(rng, mayors, {f"River {river}": town for river, town in mouths.items()}),
        *(_river(rng, f"River {river}", town, towns) for river, town in mouths.items()),
        *(_mayor(rng, mayor, town, towns) for town, mayor in mayors.items()),
    ]
    return WikiData(draw_account(rng), {article.title: article for article in articles})


def _towns(rng: random.Random, mayors: dict[str, str], mouths: dict[str, str]) -> Iterator[Article]:
    count = len(mayors)
    people, heights = rng.sample(NUMERIC_FACTS["Population"], count), rng.sample(NUMERIC_FACTS["Elevation"], count)
    founded = rng.sample(NUMERIC_FACTS["Founded"], count)
    for index, (town, mayor) in enumerate(mayors.items()):
        own = [river for river, mouth in mouths.items() if mouth == town]
        river = own[0] if own else rng.choice(list(mouths))
        box = (
            ("Population", f"{people[index]:,}"),
            ("Founded", str(founded[index])),
            ("Elevation", f"{heights[index]} m"),
            ("River", f"[[{river}]]"),
            ("Mayor", f"[[{mayor}]]"),
        )
        trade, other = rng.sample(_TRADES, 2), rng.choice([name for name in mayors if name != town])
        paragraphs = (
            f"{town} is a town on the [[{river}]]. It lives on {trade[0]} and {trade[1]}.",
            f"A ferry and a narrow road lead to [[{other}]], with which {town} shares a fair in autumn.",
        )
        yield _article(rng, town, "Towns", box, paragraphs)


def _river(rng: random.Random, river: str, mouth: str, towns: list[str]) -> Article:
    source = rng.choice([name for name in towns if name != mouth])
    box = (("Length", f"{rng.randint(12, 140)} km"), ("Source", f"Hills above [[{source}]]"), ("Mouth", f"[[{mouth}]]"))
    paragraph = f"The {river} rises in the hills above [[{source}]] and reaches the sea at [[{mouth}]]."
    return _article(rng, river, "Rivers", box, (paragraph,))


def _mayor(rng: random.Random, mayor: str, town: str, towns: list[str]) -> Article:
    home = rng.choice([name for name in towns if name != town])
    box = (("Born", str(rng.randint(1940, 1990))), ("Birthplace", f"[[{home}]]"), ("Known for", rng.choice(_WORKS)))
    paragraph = f"{mayor} grew up in [[{home}]] and has been mayor of [[{town}]] for many years."
    return _article(rng, mayor, "People", box, (paragraph,))


def _article(
    rng: random.Random, title: str, category: str, box: tuple[tuple[str, str], ...], paragraphs: tuple[str, ...]
) -> Article:
    day, history = draw_weekday(rng), []
    editors = rng.sample(_EDITORS, 4)
    for number in range(rng.randint(5, 22), 0, -1):
        history.append(Revision(number, rng.choice(editors), day, rng.choice(_SUMMARIES)))
        day -= timedelta(days=rng.randint(1, 40))
    chapters = 0 if category == "People" else 2
    sections = tuple((heading, " ".join(rng.sample(_SENTENCES, 4))) for heading in rng.sample(_HEADINGS, chapters))
    return Article(title.lower().replace(" ", "-"), title, category, box, paragraphs, sections, tuple(history))


def article_path(article: Article) -> str:
    return f"/article/{article.slug}"


class Wiki(App):
    """The wiki of one reader. Effects: ("edit", slug, fact, value, summary) and ("watch", slug)."""

    name, title, search_hint = "wiki", "Island Almanac", "Search articles"
    accent, ground = "#7a4b12", "#faf7f2"
    template_functions = (article_path,)
    popup = ("The Almanac needs you", "If everyone who reads this gave two coins, our drive would be over in an hour.")

    data: WikiData

    def __init__(self, data: WikiData, start: InitialSiteState) -> None:
        super().__init__(data, start)
        self._articles = {article.slug: article for article in data.articles.values()}
        self._changed: dict[tuple[str, str], str] = {}  # value by article and fact

    def navigation_links(self) -> tuple[tuple[str, str], ...]:
        return ("/articles", "All articles"), *((category_path(name), name) for name in ("People", "Rivers", "Towns"))

    @route("GET", "/")
    def home(self, request: PageRequest) -> PageResponse:
        featured = self.data.articles_in("Towns")[0]
        return self.render_page(
            "Welcome to the Island Almanac", "home", count=len(self._articles), featured=featured,
            beginning=self._pieces(featured.paragraphs[0]),
        )  # fmt: skip

    @route("GET", "/articles")
    def index(self, request: PageRequest) -> PageResponse:
        return self._list(
            request, "All articles", "/articles", [self.data.articles[t] for t in sorted(self.data.articles)]
        )

    @route("GET", r"/category/(people|rivers|towns)")
    def category(self, request: PageRequest, slug: str) -> PageResponse:
        return self._list(request, slug.capitalize(), f"/category/{slug}", self.data.articles_in(slug.capitalize()))

    @route("GET", "/search")
    def search(self, request: PageRequest) -> PageResponse:
        articles = self.data.articles
        found = [articles[title] for title in sorted(articles) if matches_query(request, title)]
        return self._list(request, f"{len(found)} articles found", "/articles", found[:ARTICLES_PER_PAGE])

    @route("GET", r"/article/([a-z-]+)")
    def article(self, request: PageRequest, slug: str) -> PageResponse:
        article = self.find(self._articles, slug)
        return self.render_page(
            article.title, "article", crumbs=[(category_path(article.category), article.category)], article=article,
            box=self._box(article), paragraphs=[self._pieces(paragraph) for paragraph in article.paragraphs],
        )  # fmt: skip

    @route("GET", r"/article/([a-z-]+)/history")
    def history(self, request: PageRequest, slug: str) -> PageResponse:
        article = self.find(self._articles, slug)
        self.require_login()
        shown, links = paginate(request, article.history, REVISIONS_PER_PAGE, history_path(article))
        crumbs = [(article_path(article), article.title)]
        return self.render_page(f"History of {article.title}", "history", crumbs, revisions=shown, pages=links)

    @route("GET", r"/article/([a-z-]+)/edit")
    def choose_fact(self, request: PageRequest, slug: str) -> PageResponse:
        article = self.find(self._articles, slug)
        self.require_login()
        return self.render_page(
            f"Edit the facts of {article.title}", "facts_to_edit", crumbs=[(article_path(article), article.title)],
            path=request.path, box=self._box(article),
        )  # fmt: skip

    @route("GET", r"/article/([a-z-]+)/edit/(\d)")
    def edit_page(self, request: PageRequest, slug: str, number: str) -> PageResponse:
        article, label = self._find_fact(slug, number)
        value = dict(self._box(article))[label]
        return self.render_page(f"{article.title}: {label}", "edit", path=request.path, value=value)

    @route("POST", r"/article/([a-z-]+)/edit/(\d)")
    def edit(self, request: PageRequest, slug: str, number: str) -> PageResponse:
        article, fact = self._find_fact(slug, number)
        value, summary = form_text(request, "value"), form_text(request, "summary")
        if not value or not summary:
            return self.redirect(f"/article/{slug}/edit/{number}", "Please give a value and a summary.")
        self._changed[slug, fact] = value
        return self.complete(("edit", slug, fact, value, summary), article_path(article), "Your change has been saved.")

    @route("POST", r"/watch/([a-z-]+)")
    def watch(self, request: PageRequest, slug: str) -> PageResponse:
        self.require_login()
        self.find(self._articles, slug)
        return self.complete(("watch", slug), f"/article/{slug}", "This article is on your watchlist.")

    def _find_fact(self, slug: str, number: str) -> tuple[Article, str]:
        """Article and label of a fact to edit."""
        article = self.find(self._articles, slug)
        label, _ = self.find(dict(enumerate(article.facts)), int(number))
        self.require_login()
        return article, label

    def _list(self, request: PageRequest, title: str, path: str, articles: list[Article]) -> PageResponse:
        shown, links = paginate(request, articles, ARTICLES_PER_PAGE, path)
        return self.render_page(title, "articles", articles=shown, pages=links)

    def _box(self, article: Article) -> list[tuple[str, list[tuple[str, str]]]]:
        """Label and value of the facts, as they have been changed."""
        changed = ((label, self._changed.get((article.slug, label), value)) for label, value in article.facts)
        return [(label, self._pieces(value)) for label, value in changed]

    def _pieces(self, source: str) -> list[tuple[str, str]]:
        """Text and path of the pieces of a text; the path is empty where it is no link."""
        parts = _LINK.split(source)  # text, title, text, title, ..., text
        articles = self.data.articles
        return [
            (part, article_path(articles[part]) if index % 2 and part in articles else "")
            for index, part in enumerate(parts)
        ]


def category_path(category: str) -> str:
    return f"/category/{category.lower()}"


def history_path(article: Article, page: int = 1) -> str:
    return build_path(f"/article/{article.slug}/history", page=page)


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
