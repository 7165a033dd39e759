"""Tasks of the forum."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

from megatron_webrl.tasks.sites.app import InitialSiteState, close_overlay, sign_in
from megatron_webrl.tasks.sites.content_generator import draw_initial_state, sign_in_instruction
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
from megatron_webrl.tasks.sites.goal import Environment, Goal
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, SubmitForm, next_link, next_unvisited
from megatron_webrl.tasks.sites.markup import page_count

_REPLIES = (
    "I will bring the tools on Saturday.", "Please send me a message about the price.",
    "The link in the first post is broken.", "Count me in for the next time.", "A photo would help us to answer.",
    "Mine is for sale if you are interested.",
)  # fmt: skip


def count_replies(rng: random.Random) -> Goal:
    world = generate_data(rng)
    thread = _a_thread(rng, world)
    return Goal(
        f'How many replies does the thread "{thread.title}" have? Answer with the number.',
        _listing(world, thread)[-1],
        partial(Forum, world, InitialSiteState()),
        lambda app, look: GiveAnswer(str(len(thread.posts) - 1)),
        answer=str(len(thread.posts) - 1),
    )


def follow_thread(rng: random.Random) -> Goal:
    world = generate_data(rng)
    thread = _a_thread(rng, world)
    return Goal(
        f'Follow the thread "{thread.title}".',
        _listing(world, thread)[-1],
        partial(Forum, world, InitialSiteState(signed_in=True)),
        lambda app, look: next_link(look, *_way(world, thread)) or SubmitForm(f"/follow/{thread.id}"),
        effects=(("follow", str(thread.id)),),
    )


def last_word(rng: random.Random) -> Goal:
    world = generate_data(rng)
    thread = rng.choice([t for t in _open_threads(world) if len(t.posts) > POSTS_PER_PAGE])
    last = thread.posts[-1]
    way = (*_way(world, thread), post_path(thread, last.id))
    return Goal(
        f'Who wrote the last post of the thread "{thread.title}" on the board {world.board_of(thread)}? '
        "Answer with the name.",
        "/",
        partial(Forum, world, draw_initial_state(rng)),
        lambda app, look: close_overlay(app) or next_link(look, *way) or GiveAnswer(last.author),
        answer=last.author,
    )


def like_post(rng: random.Random) -> Goal:
    world = generate_data(rng)
    thread, post = _a_lone_post(rng, world)
    way = (*_way(world, thread), post_path(thread, post.id))
    return Goal(
        f'Like the only post that {post.author} wrote in the thread "{thread.title}" on the board '
        f"{world.board_of(thread)}.",
        "/",
        partial(Forum, world, draw_initial_state(rng, signed_in=True)),
        lambda app, look: close_overlay(app) or next_link(look, *way) or SubmitForm(f"/like/{post.id}"),
        effects=(("like", str(post.id)),),
    )


def reply(rng: random.Random) -> Goal:
    world = generate_data(rng)
    thread, words = _a_thread(rng, world), rng.choice(_REPLIES)
    return Goal(
        f'{sign_in_instruction(world.account)} In the thread "{thread.title}" on the board {world.board_of(thread)}, '
        f'post this reply, once: "{words}"',
        "/",
        partial(Forum, world, draw_initial_state(rng, popup=True)),
        lambda app, look: (
            close_overlay(app)
            or sign_in(app, look)
            or next_link(look, *_way(world, thread))
            or SubmitForm(f"/reply/{thread.id}", {"words": words})
        ),
        effects=(("reply", str(thread.id), words),),
    )


def lounge_tally(rng: random.Random) -> Goal:
    world = generate_data(rng)
    while not (threads := [t for t in world.boards[LOUNGE] if len(t.posts) > POSTS_PER_PAGE and _leads(t)]):
        world = generate_data(rng)
    thread = rng.choice(threads)
    author = Counter(post.author for post in thread.posts).most_common(1)[0][0]
    pages = page_count(len(thread.posts), POSTS_PER_PAGE)
    way = (*_listing(world, thread), *(thread_path(thread, page) for page in range(1, pages + 1)))
    return Goal(
        f'{sign_in_instruction(world.account)} Who wrote the most posts in the thread "{thread.title}" of the {LOUNGE}, its '
        "first post included? Answer with the name.",
        "/",
        partial(Forum, world, draw_initial_state(rng, popup=True)),
        lambda app, look: (
            close_overlay(app)
            or sign_in(app, look)
            or next_unvisited(app.visited_paths, look, *way)
            or GiveAnswer(author)
        ),
        answer=author,
    )


def _open_threads(world: ForumData) -> list[Thread]:
    return [thread for board, threads in world.boards.items() if board != LOUNGE for thread in threads]


def _a_thread(rng: random.Random, world: ForumData) -> Thread:
    return rng.choice(_open_threads(world))


def _a_lone_post(rng: random.Random, world: ForumData) -> tuple[Thread, Post]:
    """A post whose author wrote no other in its thread."""
    found = []
    for thread in _open_threads(world):
        counts = Counter(post.author for post in thread.posts)
        found += [(thread, post) for post in thread.posts if counts[post.author] == 1]
    return rng.choice(found)


def _leads(thread: Thread) -> bool:
    """Whether one author wrote more than every other."""
    counts = Counter(post.author for post in thread.posts).most_common(2)
    return len(counts) < 2 or counts[0][1] > counts[1][1]


def _listing(world: ForumData, thread: Thread) -> tuple[str, ...]:
    """The way to the page of a board that lists a thread."""
    board = world.board_of(thread)
    page = world.boards[board].index(thread) // THREADS_PER_PAGE + 1
    return ("/", *(board_path(board, number) for number in range(1, page + 1)))


def _way(world: ForumData, thread: Thread) -> tuple[str, ...]:
    return (*_listing(world, thread), thread_path(thread))


ENVIRONMENTS = {
    "forum-count-replies": Environment(Forum, "easy", count_replies),
    "forum-follow-thread": Environment(Forum, "easy", follow_thread),
    "forum-last-word": Environment(Forum, "medium", last_word),
    "forum-like-post": Environment(Forum, "medium", like_post),
    "forum-reply": Environment(Forum, "hard", reply),
    "forum-lounge-tally": Environment(Forum, "hard", lounge_tally),
}
