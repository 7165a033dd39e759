"""The offline website forum and its tasks."""

from __future__ import annotations

import random
from collections import Counter
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
    format_date,
    matches_query,
    page_count,
    paginate,
    query_text,
    route,
    search_paths,
)
from megatron_webrl.tasks.sites.content_generator import draw_account, draw_names, draw_pairs, draw_weekday
from megatron_webrl.tasks.sites.goal import Fact, Goal, make_environments
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, SubmitForm, next_link, next_unvisited

THREADS_PER_PAGE, POSTS_PER_PAGE = 7, 4
LOUNGE = "Members' lounge"

_BOARDS = ("Bicycles", "Gardening", "Photography", "Baking", "Hiking", "Woodwork")
_OPENINGS = (
    "How do you store", "Your favourite", "Where to buy", "Advice on", "Repairing", "A beginner's question about",
    "Who has tried", "What I learned from", "Looking for", "Cheap ways to clean",
)  # fmt: skip
_TOPICS = {
    "Bicycles": ("old chains", "winter tyres", "leather saddles", "bike lights", "steel frames", "mudguards"),
    "Gardening": ("tomato seeds", "compost bins", "garden hoses", "rose cuttings", "slug traps", "raised beds"),
    "Photography": ("tripods", "macro lenses", "film rolls", "camera straps", "night shots", "light meters"),
    "Baking": ("rye starters", "bread tins", "stone ovens", "puff pastry", "dough scrapers", "vanilla pods"),
    "Hiking": ("trail maps", "wool socks", "light tents", "water filters", "walking poles", "ridge walks"),
    "Woodwork": ("hand planes", "oak boards", "bench vises", "wood glue", "dovetail saws", "linseed oil"),
    LOUNGE: (
        "the summer meeting",
        "new moderators",
        "the photo contest",
        "the forum rules",
        "the mug design",
        "birthdays",
    ),
}
_SENTENCES = (
    "I had the same trouble last year.", "Patience pays off here.", "Thanks, that is good to know.",
    "Mine lasted about three seasons.", "I would ask in a small shop first.", "That depends on the weather.",
    "Have a look at the second shelf in my shed.", "It took me a whole weekend.", "I can lend you mine.",
    "Never again, to be honest.", "This worked better than I expected.", "Could you post a picture?",
)  # fmt: skip
_TOWNS = ("Aldmere", "Corwick", "Fenport", "Holdale", "Kelmoor", "Penstead")


@dataclass(frozen=True)
class Post:
    id: int
    author: str
    day: date
    text: str
    likes: int


@dataclass(frozen=True)
class Thread:
    """A thread; the first post opened it."""

    id: int
    title: str
    posts: tuple[Post, ...]


@dataclass(frozen=True)
class ForumData:
    account: Account
    members: dict[str, tuple[str, date]]  # town and date of joining by name
    boards: dict[str, tuple[Thread, ...]]

    def board_of(self, thread: Thread) -> str:
        return next(board for board, threads in self.boards.items() if thread in threads)


def generate_data(rng: random.Random) -> ForumData:
    """A forum of three open boards and the lounge, with some 40 threads."""
    day = draw_weekday(rng)
    people = draw_names(rng, 9)
    members = {name: (rng.choice(_TOWNS), day - timedelta(days=rng.randint(300, 3000))) for name in people}
    threads = iter(rng.sample(range(1000, 9999), 60))
    posts = iter(rng.sample(range(10_000, 99_999), 800))
    boards = {}
    for board in (*rng.sample(_BOARDS, 3), LOUNGE):
        titles = draw_pairs(rng, _OPENINGS, _TOPICS[board], rng.randint(8, 12))
        boards[board] = tuple(_thread(rng, next(threads), title, people, posts, day) for title in titles)
    return ForumData(draw_account(rng), members, boards)


def _thread(rng: random.Random, id: int, title: str, people: list[str], ids: Iterator[int], day: date) -> Thread:
    count = rng.randint(3, 14)
    days = sorted(day - timedelta(days=rng.randint(0, 200)) for _ in range(count))
    talkers = rng.sample(people, rng.randint(3, 6))
    posts = [
        Post(next(ids), rng.choice(talkers), when, " ".join(rng.sample(_SENTENCES, 2)), rng.randint(0, 20))
        for when in days
    ]
    return Thread(id, title, tuple(posts))


def board_path(board: str, page: int = 1) -> str:
    return build_path(f"/board/{board.lower().replace(' ', '-').replace(chr(39), '')}", page=page)


def thread_path(thread: Thread, page: int = 1) -> str:
    return build_path(f"/thread/{thread.id}", page=page)


class Forum(App):
    """The forum of one member. Effects: ("reply", thread, text), ("like", post), ("follow", thread)."""

    name, title, search_hint = "forum", "The Clearing", "Search threads"
    accent, ground = "#5b3a8c", "#f6f4fa"
    template_functions = (board_path, thread_path)
    popup = ("Meet us in person", "Our summer meeting takes place in June. Tickets are on sale in the lounge.")

    data: ForumData

    def __init__(self, data: ForumData, start: InitialSiteState) -> None:
        super().__init__(data, start)
        self._threads = {thread.id: thread for threads in data.boards.values() for thread in threads}
        self._posts = {post.id: thread for thread in self._threads.values() for post in thread.posts}
        self._replies: dict[int, list[str]] = {}  # by thread
        self._liked: set[int] = set()

    def navigation_links(self) -> tuple[tuple[str, str], ...]:
        return ("/", "Boards"), ("/members", "Members")

    @route("GET", "/")
    def home(self, request: PageRequest) -> PageResponse:
        return self.render_page("Boards", "boards", boards=self.data.boards, lounge=LOUNGE)

    @route("GET", r"/board/([a-z-]+)")
    def board(self, request: PageRequest, slug: str) -> PageResponse:
        board = next((name for name in self.data.boards if board_path(name) == f"/board/{slug}"), None)
        if board is None:
            return self.not_found()
        if board == LOUNGE:
            self.require_login()
        threads = self.data.boards[board]
        shown, links = paginate(request, threads, THREADS_PER_PAGE, board_path(board))
        return self.render_page(board, "threads", crumbs=[("/", "Boards")], threads=shown, pages=links)

    @route("GET", "/search")
    def search(self, request: PageRequest) -> PageResponse:
        found = [
            thread
            for board, threads in self.data.boards.items()
            for thread in threads
            if board != LOUNGE and matches_query(request, thread.title)
        ]
        return self.render_page(f'{len(found)} threads match "{query_text(request)}"', "threads", threads=found)

    @route("GET", r"/thread/(\d{1,6})")
    def thread(self, request: PageRequest, id: str) -> PageResponse:
        thread = self.find(self._threads, int(id))
        board = self.data.board_of(thread)
        if board == LOUNGE:
            self.require_login()
        shown, links = paginate(request, thread.posts, POSTS_PER_PAGE, f"/thread/{id}")
        replies = self._replies.get(thread.id, []) if shown[-1] is thread.posts[-1] else []
        return self.render_page(
            thread.title, "thread", crumbs=[("/", "Boards"), (board_path(board), board)], thread=thread, posts=shown,
            replies=replies, pages=links, app=self, liked=self._liked,
        )  # fmt: skip

    @route("GET", "/members")
    def members(self, request: PageRequest) -> PageResponse:
        rows = [(name, town, format_date(since)) for name, (town, since) in sorted(self.data.members.items())]
        return self.render_page("Members", "members", rows=rows)

    @route("POST", r"/follow/(\d{1,6})")
    def follow(self, request: PageRequest, id: str) -> PageResponse:
        self.require_login()
        self.find(self._threads, int(id))
        return self.complete(("follow", id), f"/thread/{id}", "You follow this thread.")

    @route("POST", r"/like/(\d{1,6})")
    def like(self, request: PageRequest, id: str) -> PageResponse:
        self.require_login()
        path = post_path(self.find(self._posts, int(id)), int(id))
        self._liked.add(int(id))
        return self.complete(("like", id), path, "You like this post.")

    @route("POST", r"/reply/(\d{1,6})")
    def reply(self, request: PageRequest, id: str) -> PageResponse:
        words, thread = form_text(request, "words"), self._threads.get(int(id))
        if not words or thread is None:
            return self.redirect("/", "A reply must not be empty.")
        self.require_login()
        self._replies.setdefault(thread.id, []).append(words)
        path = thread_path(thread, page_count(len(thread.posts), POSTS_PER_PAGE))
        return self.complete(("reply", id, words), path, "Your reply has been posted.")


def post_path(thread: Thread, id: int) -> str:
    """Path of the page of a thread that shows a post."""
    index = next(index for index, post in enumerate(thread.posts) if post.id == id)
    return thread_path(thread, index // POSTS_PER_PAGE + 1)


_REPLIES = (
    "I will bring the tools on Saturday.", "Please send me a message about the price.",
    "The link in the first post is broken.", "Count me in for the next time.", "A photo would help us to answer.",
    "Mine is for sale if you are interested.",
)  # fmt: skip


def count_replies(rng: random.Random, data: ForumData) -> Goal:
    thread = _a_thread(rng, data)
    return Goal(
        f'How many replies does the thread "{thread.title}" have? Answer with the number.',
        _listing(data, thread)[-1],
        lambda app, view: GiveAnswer(str(len(thread.posts) - 1)),
        answer=str(len(thread.posts) - 1),
        facts=(Fact(f'The thread "{thread.title}" has {len(thread.posts) - 1} replies.', pages_listing(data, thread)),),
    )


def follow_thread(rng: random.Random, data: ForumData) -> Goal:
    thread = _a_thread(rng, data)
    return Goal(
        f'Follow the thread "{thread.title}".',
        _listing(data, thread)[-1],
        lambda app, view: next_link(view, *_path_to(data, thread)) or SubmitForm(f"/follow/{thread.id}"),
        effects=(("follow", str(thread.id)),),
        facts=(Fact(f'The forum confirms that {data.account.name} follows the thread "{thread.title}".'),),
        signed_in=True,
    )


def last_word(rng: random.Random, data: ForumData) -> Goal:
    thread = rng.choice([t for t in _open_threads(data) if len(t.posts) > POSTS_PER_PAGE])
    last = thread.posts[-1]
    path = (*_path_to(data, thread), post_path(thread, last.id))
    board = data.board_of(thread)
    return Goal(
        f'Who wrote the last post of the thread "{thread.title}" on the board {data.board_of(thread)}? '
        "Answer with the name.",
        "/",
        lambda app, view: next_link(view, *path) or GiveAnswer(last.author),
        answer=last.author,
        facts=(
            Fact(f'The thread "{thread.title}" is on the board {board}.', (_listing(data, thread)[-1], path[-1])),
            Fact(f"Its last post is of {format_date(last.day)}.", path[-1:]),
            Fact(f"{last.author} wrote that post.", path[-1:]),
            Fact(f"The answer is {last.author}."),
        ),
    )


def like_post(rng: random.Random, data: ForumData) -> Goal:
    thread, post = _a_lone_post(rng, data)
    path = (*_path_to(data, thread), post_path(thread, post.id))
    return Goal(
        f'Like the only post that {post.author} wrote in the thread "{thread.title}" on the board '
        f"{data.board_of(thread)}.",
        "/",
        lambda app, view: next_link(view, *path) or SubmitForm(f"/like/{post.id}"),
        effects=(("like", str(post.id)),),
        facts=(
            Fact("The forum confirms that a post is liked."),
            Fact(f"{post.author} wrote that post."),
            Fact(f'It is in the thread "{thread.title}".'),
            Fact("No other post was liked."),
        ),
        signed_in=True,
    )


def reply(rng: random.Random, data: ForumData) -> Goal:
    thread, words = _a_thread(rng, data), rng.choice(_REPLIES)
    return Goal(
        f'In the thread "{thread.title}" on the board {data.board_of(thread)}, post this reply, once: "{words}"',
        "/",
        lambda app, view: (
            next_link(view, *_path_to(data, thread)) or SubmitForm(f"/reply/{thread.id}", {"words": words})
        ),
        effects=(("reply", str(thread.id), words),),
        facts=(
            Fact("The forum confirms that a reply has been posted."),
            Fact(f'It is in the thread "{thread.title}".'),
            Fact(f'It says exactly "{words}".'),
            Fact(f"Its author is {data.account.name}."),
            Fact("It was posted once."),
        ),
    )


def lounge_tally(rng: random.Random, data: ForumData) -> Goal | None:
    threads = [t for t in data.boards[LOUNGE] if len(t.posts) > POSTS_PER_PAGE and _leads(t)]
    if not threads:
        return None
    thread = rng.choice(threads)
    author = Counter(post.author for post in thread.posts).most_common(1)[0][0]
    pages = page_count(len(thread.posts), POSTS_PER_PAGE)
    path = (*_listing(data, thread), *(thread_path(thread, page) for page in range(1, pages + 1)))
    return Goal(
        f'Who wrote the most posts in the thread "{thread.title}" of the {LOUNGE}, its '
        "first post included? Answer with the name.",
        "/",
        lambda app, view: next_unvisited(app.visited_paths, view, *path) or GiveAnswer(author),
        answer=author,
        facts=(
            *(
                Fact(f"Post {number} of the thread is by {post.author}.", (post_path(thread, post.id),))
                for number, post in enumerate(thread.posts, 1)
            ),
            Fact(f"{author} wrote the most posts."),
        ),
    )


def pages_listing(data: ForumData, thread: Thread) -> tuple[str, ...]:
    """The pages that show who started an open thread, and its number of replies."""
    return (_listing(data, thread)[-1], *search_paths(thread.title))


def _open_threads(data: ForumData) -> list[Thread]:
    return [thread for board, threads in data.boards.items() if board != LOUNGE for thread in threads]


def _a_thread(rng: random.Random, data: ForumData) -> Thread:
    return rng.choice(_open_threads(data))


def _a_lone_post(rng: random.Random, data: ForumData) -> tuple[Thread, Post]:
    """A post whose author wrote no other post in its thread."""
    found = []
    for thread in _open_threads(data):
        counts = Counter(post.author for post in thread.posts)
        found += [(thread, post) for post in thread.posts if counts[post.author] == 1]
    return rng.choice(found)


def _leads(thread: Thread) -> bool:
    """Whether one author wrote more posts than every other."""
    counts = Counter(post.author for post in thread.posts).most_common(2)
    return len(counts) < 2 or counts[0][1] > counts[1][1]


def _listing(data: ForumData, thread: Thread) -> tuple[str, ...]:
    """The path to the page of a board that lists a thread."""
    board = data.board_of(thread)
    page = data.boards[board].index(thread) // THREADS_PER_PAGE + 1
    return ("/", *(board_path(board, number) for number in range(1, page + 1)))


def _path_to(data: ForumData, thread: Thread) -> tuple[str, ...]:
    return (*_listing(data, thread), thread_path(thread))


ENVIRONMENTS = make_environments(
    Forum, generate_data, easy=(count_replies, follow_thread), medium=(last_word, like_post), hard=(reply, lounge_tally)
)
