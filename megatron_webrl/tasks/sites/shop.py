"""The offline website shop and its tasks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import groupby

from megatron_webrl.tasks.server import PageRequest, PageResponse
from megatron_webrl.tasks.sites.app import (
    Account,
    App,
    InitialSiteState,
    build_path,
    form_text,
    format_date,
    matches_query,
    paginate,
    query_text,
    route,
    search_paths,
)
from megatron_webrl.tasks.sites.content_generator import draw_account, draw_weekday
from megatron_webrl.tasks.sites.goal import Fact, Goal, make_environments
from megatron_webrl.tasks.sites.high_level_actions import (
    GiveAnswer,
    HighLevelAction,
    PageLinks,
    SubmitForm,
    next_link,
    next_unvisited,
)

ITEMS_PER_PAGE, ORDERS_PER_PAGE = 8, 4
MAX_QUANTITY = 9
DELIVERY_OPTIONS = (("standard", "Standard"), ("express", "Express"), ("pickup", "Pick-up in store"))
SORT_OPTIONS = (("", "Featured"), ("price", "Price, low to high"), ("rating", "Best rated"))

_KINDS = {
    "Kitchen": ("Kettle", "Skillet", "Cutting Board", "Teapot", "Pepper Mill", "Salad Bowl", "Whisk", "Carafe"),
    "Garden": ("Trowel", "Watering Can", "Planter", "Bird Feeder", "Lantern", "Secateurs", "Hose Reel", "Bench"),
    "Office": ("Desk Lamp", "Notebook", "Pen Tray", "Stapler", "Letter Opener", "Bookend", "Wall Clock", "Easel"),
    "Outdoor": ("Tent", "Headlamp", "Rucksack", "Flask", "Hammock", "Compass", "Camp Stove", "Sleeping Mat"),
    "Bath": ("Towel Set", "Soap Dish", "Bath Mat", "Mirror", "Robe", "Basket", "Brush Holder", "Candle"),
    "Toys": ("Kite", "Puzzle", "Train Set", "Yo-yo", "Marble Run", "Drum", "Spinning Top", "Dollhouse"),
}
_MAKES = (
    "Alder", "Birch", "Cobalt", "Dune", "Ember", "Fjord", "Granite", "Harbor", "Juniper", "Lark", "Maple", "Slate",
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    id: int
    name: str
    category: str
    price: int  # cents
    rating: int  # tenths of a star
    reviews: int
    in_stock: bool
    hue: int  # of its picture

    @property
    def stars(self) -> str:
        return f"{self.rating / 10:.1f}"


@dataclass(frozen=True)
class PastOrder:
    id: int
    day: date
    lines: tuple[tuple[Item, int], ...]

    @property
    def total(self) -> int:
        """Total price in cents."""
        return sum(item.price * count for item, count in self.lines)


@dataclass(frozen=True)
class ShopData:
    account: Account
    items: tuple[Item, ...]
    orders: tuple[PastOrder, ...]  # newest first

    @property
    def categories(self) -> list[str]:
        return sorted({item.category for item in self.items})

    @property
    def popular_items(self) -> list[Item]:
        """The items on the start page."""
        return sorted(self.items, key=lambda item: -item.reviews)[:4]

    def items_in_category(self, category: str, sort: str = "") -> list[Item]:
        """The items of a category in the order of its pages."""
        found = [item for item in self.items if item.category == category]
        orders = {"price": lambda item: item.price, "rating": lambda item: (-item.rating, item.price)}
        return sorted(found, key=orders[sort]) if sort in orders else found


def generate_data(rng: random.Random) -> ShopData:
    """Draw a shop with about 50 items and 10 to 14 past orders."""
    kinds = [(category, kind) for category in rng.sample(sorted(_KINDS), 4) for kind in _KINDS[category]]
    chosen = [(section, f"{make} {kind}") for section, kind in kinds for make in rng.sample(_MAKES, rng.choice((1, 2)))]
    rng.shuffle(chosen)
    ids = rng.sample(range(100, 1000), len(chosen))
    prices = rng.sample(range(450, 14950, 5), len(chosen))
    items = tuple(
        Item(
            id, name, category, price, rng.randint(30, 50), rng.randint(3, 900), rng.random() < 0.8, rng.randrange(360)
        )
        for id, (category, name), price in zip(ids, chosen, prices, strict=True)
    )
    day, orders = draw_weekday(rng), []
    for number in rng.sample(range(10_000, 99_999), rng.randint(10, 14)):
        day -= timedelta(days=rng.randint(2, 14))
        lines = tuple((item, rng.randint(1, 3)) for item in rng.sample(items, rng.randint(1, 3)))
        orders.append(PastOrder(number, day, lines))
    return ShopData(draw_account(rng), items, tuple(orders))


def format_price(cents: int) -> str:
    """A price such as $12.50."""
    return f"${cents // 100}.{cents % 100:02d}"


class Shop(App):
    """The shop of one customer. Effects: ("order", user, delivery, "id x count", ...) and ("save", id)."""

    name, title, search_hint = "shop", "Larkfield Store", "Search items"
    accent, ground = "#14532d", "#f4f7f4"
    template_functions = (format_price,)
    popup = ("10 % off your next order", "Join 40,000 readers of our newsletter and save on everything you love.")

    data: ShopData

    def __init__(self, data: ShopData, start: InitialSiteState, cart: dict[int, int] | None = None) -> None:
        super().__init__(data, start)
        self.cart = dict(cart or {})  # count by item id
        self._items = {item.id: item for item in data.items}

    def navigation_links(self) -> tuple[tuple[str, str], ...]:
        count = sum(self.cart.values())
        return ("/orders", "My orders"), ("/cart", f"Cart ({count})")

    @route("GET", "/")
    def home(self, request: PageRequest) -> PageResponse:
        counts = [(name, len(self.data.items_in_category(name))) for name in self.data.categories]
        return self.render_page("Good things for every day", "home", counts=counts, popular=self.data.popular_items)

    @route("GET", r"/category/([a-z]+)")
    def category(self, request: PageRequest, slug: str) -> PageResponse:
        name = slug.capitalize()
        if name not in self.data.categories:
            return self.not_found()
        sort = request.query.get("sort", "")
        sort = sort if sort in dict(SORT_OPTIONS) else ""
        items = self.data.items_in_category(name, sort)
        shown, links = paginate(request, items, ITEMS_PER_PAGE, f"/category/{slug}", sort=sort)
        tabs = [(label, "" if key == sort else category_path(name, key)) for key, label in SORT_OPTIONS]
        return self.render_page(name, "category", tabs=tabs, items=shown, pages=links)

    @route("GET", "/search")
    def search(self, request: PageRequest) -> PageResponse:
        found = [item for item in self.data.items if matches_query(request, item.name)]
        title = f'{len(found)} results for "{query_text(request)}"'
        return self.render_page(title, "cards", items=found)

    @route("GET", r"/item/(\d{1,6})")
    def item(self, request: PageRequest, id: str) -> PageResponse:
        item = self.find(self._items, int(id))
        return self.render_page(item.name, "item", crumbs=[(category_path(item.category), item.category)], item=item)

    @route("POST", r"/save/(\d{1,6})")
    def save(self, request: PageRequest, id: str) -> PageResponse:
        self.find(self._items, int(id))
        return self.complete(("save", id), f"/item/{id}", "Saved to your wish list.")

    @route("POST", r"/cart/add/(\d{1,6})")
    def add(self, request: PageRequest, id: str) -> PageResponse:
        item, quantity = self.find(self._items, int(id)), form_text(request, "quantity")
        if not item.in_stock:
            return self.not_found()
        count = self.cart.get(item.id, 0) + (int(quantity) if quantity in list("123456789") else 100)
        if count > MAX_QUANTITY:
            return self.redirect(f"/item/{id}", f"The quantity must be a number from 1 to {MAX_QUANTITY} in all.")
        self.cart[item.id] = count
        return self.redirect("/cart", f"{item.name} is in your cart.")

    @route("POST", r"/cart/remove/(\d{1,6})")
    def remove(self, request: PageRequest, id: str) -> PageResponse:
        self.cart.pop(int(id), None)
        return self.redirect("/cart", "Removed.")

    @route("GET", "/cart")
    def show_cart(self, request: PageRequest) -> PageResponse:
        title = "Your cart" if self.cart else "Your cart is empty"
        return self.render_page(title, "cart", lines=self._cart_lines(), total=self._total())

    @route("GET", "/checkout")
    def checkout(self, request: PageRequest) -> PageResponse:
        if not self.cart:
            return self.redirect("/cart")
        return self.render_page(
            "Check-out", "checkout", lines=self._cart_lines(), total=self._total(), options=DELIVERY_OPTIONS,
            customer=self.account.name if self.signed_in else "a guest",
        )  # fmt: skip

    @route("POST", "/order")
    def order(self, request: PageRequest) -> PageResponse:
        delivery = form_text(request, "delivery")
        if not self.cart or delivery not in dict(DELIVERY_OPTIONS):
            return self.redirect("/cart")
        effect = order_effect(self.account.user if self.signed_in else "guest", delivery, self.cart)
        self.cart.clear()
        return self.complete(effect, "/thanks")

    @route("GET", "/thanks")
    def thanks(self, request: PageRequest) -> PageResponse:
        return self.render_page("Thank you for your order", "thanks")

    @route("GET", "/orders")
    def orders(self, request: PageRequest) -> PageResponse:
        self.require_login()
        orders, links = paginate(request, self.data.orders, ORDERS_PER_PAGE, "/orders")
        return self.render_page("Your orders", "orders", orders=orders, pages=links)

    def _cart_lines(self) -> list[tuple[Item, int]]:
        return [(self._items[id], count) for id, count in self.cart.items()]

    def _total(self) -> int:
        return sum(self._items[id].price * count for id, count in self.cart.items())


def order_effect(user: str, delivery: str, cart: dict[int, int]) -> tuple[str, ...]:
    return ("order", user, delivery, *(f"{id} x {count}" for id, count in sorted(cart.items())))


def category_path(category: str, sort: str = "", page: int = 1) -> str:
    return build_path(f"/category/{category.lower()}", sort=sort, page=page)


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
            f'The "{item.name}" costs {format_price(item.price)}, is rated {item.stars} and is '
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
