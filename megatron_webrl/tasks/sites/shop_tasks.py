"""Tasks of the shop."""

from __future__ import annotations

import random
from functools import partial
from itertools import groupby

from megatron_webrl.tasks.sites.app import Start, clear_way, sign_in
from megatron_webrl.tasks.sites.goal import Environment, Goal
from megatron_webrl.tasks.sites.markup import address
from megatron_webrl.tasks.sites.moves import Answer, Look, Move, Submit, tour, walk
from megatron_webrl.tasks.sites.shop import (
    DELIVERIES,
    ITEMS_PER_PAGE,
    ORDERS_PER_PAGE,
    Item,
    Shop,
    World,
    category_path,
    make_world,
    money,
    order_effect,
)
from megatron_webrl.tasks.sites.words import credentials, obstacles


def find_price(rng: random.Random) -> Goal:
    world = make_world(rng)
    item = rng.choice(world.items)
    return Goal(
        f'What does the "{item.name}" cost? Answer with the price.',
        _listing(world, item),
        partial(Shop, world, Start()),
        lambda app, look: Answer(money(item.price)),
        answer=money(item.price),
    )


def save_item(rng: random.Random) -> Goal:
    world = make_world(rng)
    item = rng.choice(world.items)
    return Goal(
        f'Save the "{item.name}" to the wish list.',
        _listing(world, item),
        partial(Shop, world, Start()),
        lambda app, look: walk(look, *_way(world, item)) or Submit(f"/save/{item.id}"),
        effects=(("save", str(item.id)),),
    )


def best_offer(rng: random.Random) -> Goal:
    world = make_world(rng)
    category = rng.choice(world.categories)
    listed = world.listed(category, "price")
    rating = rng.choice(sorted(item.rating for item in listed if item.in_stock)[-4:])
    best = next(item for item in listed if item.in_stock and item.rating >= rating)
    page = listed.index(best) // ITEMS_PER_PAGE + 1
    way = ("/", category_path(category), *(category_path(category, "price", n) for n in range(1, page + 1)))
    return Goal(
        f"Of the items in the category {category} that are in stock and rated {rating / 10:.1f} or better, "
        "which one is the cheapest? Answer with its name.",
        "/",
        partial(Shop, world, obstacles(rng)),
        lambda app, look: clear_way(app) or tour(app.seen, look, *way) or Answer(best.name),
        answer=best.name,
    )


def buy_item(rng: random.Random) -> Goal:
    world = make_world(rng)
    item = rng.choice([item for item in world.items if item.in_stock])
    count, (delivery, label) = rng.randint(1, 5), rng.choice(DELIVERIES)
    return Goal(
        f'Order {count} of the "{item.name}" as a guest. Delivery: {label}. Order nothing else.',
        "/",
        partial(Shop, world, obstacles(rng)),
        lambda app, look: clear_way(app) or _shop(app, look, {item.id: count}, delivery),
        effects=(order_effect("guest", delivery, {item.id: count}),),
    )


def order_list(rng: random.Random) -> Goal:
    world = make_world(rng)
    chosen = rng.sample([item for item in world.items if item.in_stock], 4)
    forgotten, wanted = chosen[0], {item.id: rng.randint(1, 4) for item in chosen[1:]}
    delivery, label = rng.choice(DELIVERIES)
    listed = "; ".join(f'{wanted[item.id]} of the "{item.name}"' for item in chosen[1:])
    return Goal(
        f"{credentials(world.account)} Then order exactly this: {listed}. Delivery: {label}. "
        "Whatever else is in the cart must not be ordered.",
        "/",
        partial(Shop, world, obstacles(rng, popup=True), {forgotten.id: 1}),
        lambda app, look: clear_way(app) or sign_in(app, look) or _shop(app, look, wanted, delivery),
        effects=(order_effect(world.account.user, delivery, wanted),),
    )


def month_total(rng: random.Random) -> Goal:
    world = make_world(rng)
    months = [list(orders) for _, orders in groupby(world.orders, lambda order: f"{order.day:%B %Y}")]
    most = max(len(orders) for orders in months)
    orders = rng.choice([orders for orders in months if len(orders) == most])
    total = money(sum(order.total for order in orders))
    # Orders are listed from the newest: all of a month have been seen with the page of its last one.
    pages = world.orders.index(orders[-1]) // ORDERS_PER_PAGE + 1
    way = tuple(address("/orders", page=page) for page in range(1, pages + 1))
    return Goal(
        f"{credentials(world.account)} How much did all orders of {orders[0].day:%B %Y} cost together? "
        "Answer with the sum.",
        "/",
        partial(Shop, world, obstacles(rng, popup=True)),
        lambda app, look: clear_way(app) or sign_in(app, look) or tour(app.seen, look, *way) or Answer(total),
        answer=total,
    )


def _shop(app: Shop, look: Look, wanted: dict[int, int], delivery: str) -> Move:
    """Bring the cart in order, then check out."""
    items = {item.id: item for item in app.world.items}
    for id, count in app.cart.items():
        if count > wanted.get(id, 0):
            return walk(look, "/cart") or Submit(f"/cart/remove/{id}")
    for id, count in wanted.items():
        if missing := count - app.cart.get(id, 0):
            return walk(look, *_way(app.world, items[id])) or Submit(f"/cart/add/{id}", {"quantity": str(missing)})
    return walk(look, "/cart", "/checkout") or Submit("/order", {"delivery": delivery})


def _page(world: World, item: Item) -> int:
    return world.listed(item.category).index(item) // ITEMS_PER_PAGE + 1


def _listing(world: World, item: Item) -> str:
    """The page of a category that shows an item."""
    return category_path(item.category, page=_page(world, item))


def _way(world: World, item: Item) -> tuple[str, ...]:
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
