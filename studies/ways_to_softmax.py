"""The parts between linear attention and softmax, and the ways from one to the other.

A cell is a set of parts. Order 1 under a row sum is always expanded about the mean, as its row sum about zero
can vanish. An expansion about the mean drops a factor of its row, so it cannot be combined with 1/t. The
feature map and exp are not expansions, so the centre changes nothing there.
"""

from maclaurin.study import Cell, Waterfall, waterfall

NO_MAP, ORDER_2, ORDERS_3_4, ALL_ORDERS = "no feature map", "order 2", "orders 3 and 4", "all orders"
ROW_SUM, L2, MEAN, GATE = "row sum", "L2 norm", "about the mean", "gate"
#: each kernel has one more part than the one before
CHAIN = (NO_MAP, ORDER_2, ORDERS_3_4, ALL_ORDERS)
KERNELS = ("linear(elu1)", "taylor(1)", "taylor(2)", "taylor(4)", "exp")


def notation(on: frozenset[str]) -> str | None:
    """The attention with these parts, or None if their combination has no meaning."""
    count = sum(part in on for part in CHAIN)
    if not on.issuperset(CHAIN[:count]):
        return None
    kernel = KERNELS[count]
    denominator = "sum" if ROW_SUM in on else "l2" if L2 in on else "len"
    if (kernel, denominator) == ("taylor(1)", "sum") or (MEAN in on and kernel.startswith("taylor")):
        if denominator == "len":
            return None
        kernel = kernel.replace(")", ",about=mean)")
    return f"{kernel}/{denominator}{'*out' if GATE in on else ''}"


def name(text: str) -> str:
    """A notation in words: order 2 about mean, row sum, gate."""
    if text == "exp/sum":
        return "softmax"
    kernel, _, rest = text.partition("/")
    words = kernel.replace("linear(elu1)", "linear elu").replace("taylor(", "order ").rstrip(")")
    denominator = {"sum": "row sum", "l2": "L2", "len": "1/t"}[rest.removesuffix("*out")]
    gate = ", gate" if rest.endswith("*out") else ""
    return f"{words.replace(',about=', ' about ')}, {denominator}{gate}"


def way(title: str, begin: tuple[str, ...], parts: tuple[str, ...]) -> Waterfall:
    """The way from the parts of `begin` to all parts, one by one."""

    def cell(on: frozenset[str]) -> str | None:
        text = notation(on | set(begin))
        return None if text is None else name(text)

    return waterfall(title, parts, cell)


FROM_LINEAR = way("From linear attention to softmax", (ROW_SUM,), (*CHAIN, MEAN))
HIGHER = (ORDER_2, ORDERS_3_4, ALL_ORDERS)
TO_SOFTMAX = way("From order 1 under 1/t to softmax", (NO_MAP,), (*HIGHER, ROW_SUM))
TO_NORM = way("From order 1 under 1/t to the L2 norm", (NO_MAP,), (*HIGHER, L2))
TO_GATED_SOFTMAX = way("From order 1 under 1/t to softmax with a gate", (NO_MAP,), (*HIGHER, ROW_SUM, GATE))
TO_GATED_NORM = way("From order 1 under 1/t to the L2 norm with a gate", (NO_MAP,), (*HIGHER, L2, GATE))


def cells(*ways: Waterfall) -> tuple[Cell, ...]:
    """Every attention on these ways, softmax first."""
    texts = {
        name(f"{kernel}/{end}"): f"{kernel}/{end}"
        for kernel in (*KERNELS, *(k.replace(")", ",about=mean)") for k in KERNELS[1:4]))
        for denominator in ("sum", "len", "l2")
        for end in (denominator, f"{denominator}*out")
    }
    names = dict.fromkeys(["softmax", *(cell for each in ways for cell in each.cells)])
    return tuple(Cell(each, {"attention": (texts[each],)}) for each in names)
