"""Tasks of the shop."""

from __future__ import annotations

import random
from functools import partial
from itertools import groupby

from megatron_webrl.tasks.sites.app import InitialSiteState, close_overlay, sign_in
from megatron_webrl.tasks.sites.content_generator import draw_initial_state, sign_in_instruction
from megatron_webrl.tasks.sites.goal import Environment, Goal
from megatron_webrl.tasks.sites.high_level_actions import (
    GiveAnswer,
    HighLevelAction,
    PageLinks,
    SubmitForm,
    next_link,
    next_unvisited,
)
from megatron_webrl.tasks.sites.markup import build_path
from megatron_webrl.tasks.sites.shop import (
    DELIVERY_OPTIONS,
    ITEMS_PER_PAGE,
    ORDERS_PER_PAGE,
    Item,
    Shop,
    ShopData,
    category_path,
    format_price,
    generate_data,
    order_effect,
)


def find_price(rng: random.Random) -> Goal:
    world = generate_data(rng)
    item = rng.choice(world.items)
    return Goal(
        f'What does the "{item.name}" cost? Answer with the price.',
        _listing(world, item),
        partial(Shop, world, InitialSiteState()),
        lambda app, look: GiveAnswer(format_price(item.price)),
        answer=format_price(item.price),
    )


def save_item(rng: random.Random) -> Goal:
    world = generate_data(rng)
    item = rng.choice(world.items)
    return Goal(
        f'Save the "{item.name}" to the wish list.',
        _listing(world, item),
        partial(Shop, world, InitialSiteState()),
        lambda app, look: next_link(look, *_way(world, item)) or SubmitForm(f"/save/{item.id}"),
        effects=(("save", str(item.id)),),
    )


def best_offer(rng: random.Random) -> Goal:
    world = generate_data(rng)
    category = rng.choice(world.categories)
    listed = world.items_in_category(category, "price")
    rating = rng.choice(sorted(item.rating for item in listed if item.in_stock)[-4:])
    best = next(item for item in listed if item.in_stock and item.rating >= rating)
    page = listed.index(best) // ITEMS_PER_PAGE + 1
    way = ("/", category_path(category), *(category_path(category, "price", n) for n in range(1, page + 1)))
    return Goal(
        f"Of the items in the category {category} that are in stock and rated {rating / 10:.1f} or better, "
        "which one is the cheapest? Answer with its name.",
        "/",
        partial(Shop, world, draw_initial_state(rng)),
        lambda app, look: close_overlay(app) or next_unvisited(app.visited_paths, look, *way) or GiveAnswer(best.name),
        answer=best.name,
    )


def buy_item(rng: random.Random) -> Goal:
    world = generate_data(rng)
    item = rng.choice([item for item in world.items if item.in_stock])
    count, (delivery, label) = rng.randint(1, 5), rng.choice(DELIVERY_OPTIONS)
    return Goal(
        f'Order {count} of the "{item.name}" as a guest. Delivery: {label}. Order nothing else.',
        "/",
        partial(Shop, world, draw_initial_state(rng)),
        lambda app, look: close_overlay(app) or _shop(app, look, {item.id: count}, delivery),
        effects=(order_effect("guest", delivery, {item.id: count}),),
    )


def order_list(rng: random.Random) -> Goal:
    world = generate_data(rng)
    chosen = rng.sample([item for item in world.items if item.in_stock], 4)
    forgotten, wanted = chosen[0], {item.id: rng.randint(1, 4) for item in chosen[1:]}
    delivery, label = rng.choice(DELIVERY_OPTIONS)
    listed = "; ".join(f'{wanted[item.id]} of the "{item.name}"' for item in chosen[1:])
    return Goal(
        f"{sign_in_instruction(world.account)} Then order exactly this: {listed}. Delivery: {label}. "
        "Whatever else is in the cart must not be ordered.",
        "/",
        partial(Shop, world, draw_initial_state(rng, popup=True), {forgotten.id: 1}),
        lambda app, look: close_overlay(app) or sign_in(app, look) or _shop(app, look, wanted, delivery),
        effects=(order_effect(world.account.user, delivery, wanted),),
    )


def month_total(rng: random.Random) -> Goal:
    world = generate_data(rng)
    months = [list(orders) for _, orders in groupby(world.orders, lambda order: f"{order.day:%B %Y}")]
    most = max(len(orders) for orders in months)
    orders = rng.choice([orders for orders in months if len(orders) == most])
    total = format_price(sum(order.total for order in orders))
    # Orders are listed from the newest: all of a month have been seen with the page of its last one.
    pages = world.orders.index(orders[-1]) // ORDERS_PER_PAGE + 1
    way = tuple(build_path("/orders", page=page) for page in range(1, pages + 1))
    return Goal(
        f"{sign_in_instruction(world.account)} How much did all orders of {orders[0].day:%B %Y} cost together? "
        "Answer with the sum.",
        "/",
        partial(Shop, world, draw_initial_state(rng, popup=True)),
        lambda app, look: (
            close_overlay(app)
            or sign_in(app, look)
            or next_unvisited(app.visited_paths, look, *way)
            or GiveAnswer(total)
        ),
        answer=total,
    )


def _shop(app: Shop, look: PageLinks, wanted: dict[int, int], delivery: str) -> HighLevelAction:
    """Bring the cart in order, then check out."""
    items = {item.id: item for item in app.data.items}
    for id, count in app.cart.items():
        if count > wanted.get(id, 0):
            return next_link(look, "/cart") or SubmitForm(f"/cart/remove/{id}")
    for id, count in wanted.items():
        if missing := count - app.cart.get(id, 0):
            return next_link(look, *_way(app.data, items[id])) or SubmitForm(
                f"/cart/add/{id}", {"quantity": str(missing)}
            )
    return next_link(look, "/cart", "/checkout") or SubmitForm("/order", {"delivery": delivery})


def _page(world: ShopData, item: Item) -> int:
    return world.items_in_category(item.category).index(item) // ITEMS_PER_PAGE + 1


def _listing(world: ShopData, item: Item) -> str:
    """The page of a category that shows an item."""
    return category_path(item.category, page=_page(world, item))


def _way(world: ShopData, item: Item) -> tuple[str, ...]:
    listings = (category_path(item.category, page=page) for page in range(1, _page(world, item) + 1))
    return ("/", *listings, f"/item/{item.id}")


ENVIRONMENTS = {
    "shop-find-price": Environment(Shop, "easy", find_price),
    "shop-save-item": Environment(Shop, "easy", save_item),
    "shop-best-offer": Environment(Shop, "medium", best_offer),
    "shop-buy-item": Environment(Shop, "medium", buy_item),
    "shop-order-list": Environment(Shop, "hard", order_list),
    "shop-month-total": Environment(Shop, "hard", month_total),
}
