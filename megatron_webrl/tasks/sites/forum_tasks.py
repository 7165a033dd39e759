"""Tasks of the forum."""

from __future__ import annotations

import random
from collections import Counter

from megatron_webrl.tasks.sites.app import search_paths
from megatron_webrl.tasks.sites.content_generator import format_date
from megatron_webrl.tasks.sites.forum import (
    LOUNGE,
    POSTS_PER_PAGE,
    THREADS_PER_PAGE,
    Forum,
    ForumData,
    Post,
    Thread,
    board_path,
    generate_data,
    post_path,
    thread_path,
)
from megatron_webrl.tasks.sites.goal import Fact, Goal, make_environments
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, SubmitForm, next_link, next_unvisited
from megatron_webrl.tasks.sites.markup import page_count

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
