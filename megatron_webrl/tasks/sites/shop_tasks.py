"""Tasks of the shop."""

from __future__ import annotations

import random
from itertools import groupby

from megatron_webrl.tasks.sites.app import search_paths
from megatron_webrl.tasks.sites.content_generator import format_date
from megatron_webrl.tasks.sites.goal import Fact, Goal, make_environments
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
    SORT_OPTIONS,
    Item,
    Shop,
    ShopData,
    category_path,
    format_price,
    generate_data,
    order_effect,
)


def find_price(rng: random.Random, data: ShopData) -> Goal:
    item = rng.choice(data.items)
    return Goal(
        f'What does the "{item.name}" cost? Answer with the price.',
        _listing(data, item),
        lambda app, view: GiveAnswer(format_price(item.price)),
        answer=format_price(item.price),
        facts=(Fact(f'The "{item.name}" costs {format_price(item.price)}.', pages_showing(data, item)),),
    )


def save_item(rng: random.Random, data: ShopData) -> Goal:
    item = rng.choice(data.items)
    return Goal(
        f'Save the "{item.name}" to the wish list.',
        _listing(data, item),
        lambda app, view: next_link(view, *_path_to(data, item)) or SubmitForm(f"/save/{item.id}"),
        effects=(("save", str(item.id)),),
        facts=(Fact(f'The shop confirms that the "{item.name}" is on the wish list.'),),
    )


def best_offer(rng: random.Random, data: ShopData) -> Goal:
    category = rng.choice(data.categories)
    listed = data.items_in_category(category, "price")
    rating = rng.choice(sorted(item.rating for item in listed if item.in_stock)[-4:])
    best = next(item for item in listed if item.in_stock and item.rating >= rating)
    page = listed.index(best) // ITEMS_PER_PAGE + 1
    path = ("/", category_path(category), *(category_path(category, "price", n) for n in range(1, page + 1)))
    compared = (
        Fact(
            f'The "{item.name}" costs {format_price(item.price)}, is rated {item.rating / 10:.1f} and is '
            f"{'in stock' if item.in_stock else 'sold out'}.",
            pages_showing(data, item),
        )
        for item in listed[: listed.index(best) + 1]
    )
    return Goal(
        f"Of the items in the category {category} that are in stock and rated {rating / 10:.1f} or better, "
        "which one is the cheapest? Answer with its name.",
        "/",
        lambda app, view: next_unvisited(app.visited_paths, view, *path) or GiveAnswer(best.name),
        answer=best.name,
        facts=(*compared, Fact(f'The cheapest of those in stock and rated {rating / 10:.1f} is the "{best.name}".')),
    )


def buy_item(rng: random.Random, data: ShopData) -> Goal:
    item = rng.choice([item for item in data.items if item.in_stock])
    count, (delivery, label) = rng.randint(1, 5), rng.choice(DELIVERY_OPTIONS)
    return Goal(
        f'Order {count} of the "{item.name}" as a guest. Delivery: {label}. Order nothing else.',
        "/",
        lambda app, view: _shop(app, view, {item.id: count}, delivery),
        effects=(order_effect("guest", delivery, {item.id: count}),),
        facts=(
            Fact(f'The "{item.name}" was ordered.'),
            Fact(f"{count} of it were ordered."),
            Fact(f"The delivery is {label}."),
            Fact("The order was placed as a guest."),
            Fact("Nothing else was ordered."),
        ),
    )


def order_list(rng: random.Random, data: ShopData) -> Goal:
    chosen = rng.sample([item for item in data.items if item.in_stock], 4)
    forgotten, wanted = chosen[0], {item.id: rng.randint(1, 4) for item in chosen[1:]}
    delivery, label = rng.choice(DELIVERY_OPTIONS)
    listed = "; ".join(f'{wanted[item.id]} of the "{item.name}"' for item in chosen[1:])
    return Goal(
        f"Then order exactly this: {listed}. Delivery: {label}. Whatever else is in the cart must not be ordered.",
        "/",
        lambda app, view: _shop(app, view, wanted, delivery),
        effects=(order_effect(data.account.user, delivery, wanted),),
        facts=(
            *(Fact(f'{wanted[item.id]} of the "{item.name}" were ordered.') for item in chosen[1:]),
            Fact(f"The delivery is {label}."),
            Fact(f"The order was placed by {data.account.name}."),
            Fact("Nothing else was ordered."),
            Fact("There was one order."),
        ),
        app_options={"cart": {forgotten.id: 1}},
    )


def month_total(rng: random.Random, data: ShopData) -> Goal:
    months = [list(orders) for _, orders in groupby(data.orders, lambda order: f"{order.day:%B %Y}")]
    most = max(len(orders) for orders in months)
    orders = rng.choice([orders for orders in months if len(orders) == most])
    total = format_price(sum(order.total for order in orders))
    # Orders are listed from the newest: all of a month have been seen with the page of its last one.
    pages = data.orders.index(orders[-1]) // ORDERS_PER_PAGE + 1
    path = tuple(build_path("/orders", page=page) for page in range(1, pages + 1))
    return Goal(
        f"How much did all orders of {orders[0].day:%B %Y} cost together? Answer with the sum.",
        "/",
        lambda app, view: next_unvisited(app.visited_paths, view, *path) or GiveAnswer(total),
        answer=total,
        facts=(
            *(
                Fact(
                    f"Order {order.id} of {format_date(order.day)} cost {format_price(order.total)}.",
                    (build_path("/orders", page=data.orders.index(order) // ORDERS_PER_PAGE + 1),),
                )
                for order in orders
            ),
            Fact(f"{orders[0].day:%B %Y} has {len(orders)} orders."),
            Fact(f"Together they cost {total}."),
        ),
    )


def _shop(app: Shop, view: PageLinks, wanted: dict[int, int], delivery: str) -> HighLevelAction:
    """Correct the cart, then check out."""
    items = {item.id: item for item in app.data.items}
    for id, count in app.cart.items():
        if count > wanted.get(id, 0):
            return next_link(view, "/cart") or SubmitForm(f"/cart/remove/{id}")
    for id, count in wanted.items():
        if missing := count - app.cart.get(id, 0):
            return next_link(view, *_path_to(app.data, items[id])) or SubmitForm(
                f"/cart/add/{id}", {"quantity": str(missing)}
            )
    return next_link(view, "/cart", "/checkout") or SubmitForm("/order", {"delivery": delivery})


def pages_showing(data: ShopData, item: Item) -> tuple[str, ...]:
    """The pages that show price, rating and availability of an item."""
    listings = []
    for sort, _ in SORT_OPTIONS:
        page = data.items_in_category(item.category, sort).index(item) // ITEMS_PER_PAGE + 1
        listings.append(category_path(item.category, sort, page))
    home = ("/",) if item in data.popular_items else ()
    return (*listings, f"/item/{item.id}", *home, *search_paths(item.name))


def _page(data: ShopData, item: Item) -> int:
    return data.items_in_category(item.category).index(item) // ITEMS_PER_PAGE + 1


def _listing(data: ShopData, item: Item) -> str:
    """The page of a category that shows an item."""
    return category_path(item.category, page=_page(data, item))


def _path_to(data: ShopData, item: Item) -> tuple[str, ...]:
    listings = (category_path(item.category, page=page) for page in range(1, _page(data, item) + 1))
    return ("/", *listings, f"/item/{item.id}")


ENVIRONMENTS = make_environments(
    Shop, generate_data, easy=(find_price, save_item), medium=(best_offer, buy_item), hard=(order_list, month_total)
)
