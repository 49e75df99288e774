"""The contribution of each part to the gap between two cells.

    φ_i = mean over admissible orders of  v(S + i) − v(S)        S the parts added before i

Parts are switches, and a combination of switches has a meaning if it names a cell. An order of adding the
switches is admissible if every combination along it has a meaning; all admissible orders have equal weight.
If all combinations have a meaning, φ is the Shapley value. The contributions add up to v(all) − v(none), and
each is a weighted sum of the values of cells, so it can be computed seed by seed.

Two switches interact if one contributes more together with the other than alone:

    I_ij = mean over squares of  v(S + i + j) − v(S + i) − v(S + j) + v(S)

over the combinations S after which both can be added in either order, weighted by the number of admissible
orders that add them there. Without restrictions this is the Shapley interaction index (Grabisch and Roubens
1999). Switches whose order is fixed, such as order 2 and order 4, have no interaction.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from maclaurin.errors import InputError
from maclaurin.wording import did_you_mean

On = frozenset[str]
#: cell → weight: a sum over cells
Weights = dict[str, float]


@final
@dataclass(frozen=True)
class Combination:
    """The switches that are on, and the cell with this combination."""

    on: tuple[str, ...]
    cell: str


@final
@dataclass(frozen=True)
class Interaction:
    """The interaction of two switches.

    interaction_contrast   what both contribute together beyond each alone: beside − alone
    alone                  what the second contributes without the first
    beside                 what the second contributes with the first
    """

    first: str
    second: str
    interaction_contrast: Weights
    alone: Weights
    beside: Weights


@final
@dataclass(frozen=True)
class Waterfall:
    """A decomposition of the gap between two cells, part by part.

    title          one line for the page
    switches       the parts, in the order in which they are drawn
    combinations   those with a meaning; one cell may be used for several, if a switch changes nothing
    """

    title: str
    switches: tuple[str, ...]
    combinations: tuple[Combination, ...]

    def __post_init__(self) -> None:
        if len(set(self.switches)) < len(self.switches):
            raise InputError(f"waterfall {self.title!r} names a switch twice: {', '.join(self.switches)}.")
        for combination in self.combinations:
            for name in combination.on:
                if name not in self.switches:
                    raise InputError(
                        f"waterfall {self.title!r}: cell {combination.cell!r} has the switch {name!r}, which "
                        f"is not one of {', '.join(self.switches)}.{did_you_mean(name, self.switches)}"
                    )
        if len(self._cells) < len(self.combinations):
            raise InputError(f"waterfall {self.title!r} has two cells for one combination of switches.")
        if not self._before.get(frozenset(self.switches)):
            raise InputError(
                f"waterfall {self.title!r}: no order of adding {', '.join(self.switches)} one by one leads "
                "from no switch to all of them through combinations that have a cell."
            )

    @property
    def start(self) -> str:
        """The cell without any switch."""
        return self._cells[frozenset()]

    @property
    def end(self) -> str:
        """The cell with all of them."""
        return self._cells[frozenset(self.switches)]

    @property
    def cells(self) -> tuple[str, ...]:
        """Every cell that a combination names."""
        return tuple(dict.fromkeys(combination.cell for combination in self.combinations))

    @property
    def orders(self) -> int:
        """How many orders are admissible."""
        return self._before[frozenset(self.switches)]

    @functools.cached_property
    def contributions(self) -> dict[str, Weights]:
        """Switch → its contribution, as weights of cells."""
        return {switch: self._contribution(switch) for switch in self.switches}

    @functools.cached_property
    def interactions(self) -> tuple[Interaction, ...]:
        """Every pair that can be added in either order somewhere in an admissible order."""
        pairs = itertools.combinations(self.switches, 2)
        return tuple(found for pair in pairs if (found := self._interaction(*pair)) is not None)

    # ------------------------------------------------------------------------------ counting

    @functools.cached_property
    def _cells(self) -> Mapping[On, str]:
        return {frozenset(combination.on): combination.cell for combination in self.combinations}

    @functools.cached_property
    def _before(self) -> Mapping[On, int]:
        """Combination → number of ways to reach it from no switch."""
        ways: dict[On, int] = {}
        for on in sorted(self._cells, key=len):
            reached = sum(ways.get(on - {switch}, 0) for switch in on)
            ways[on] = reached if on else 1
        return ways

    @functools.cached_property
    def _after(self) -> Mapping[On, int]:
        """Combination → number of ways to reach all switches from it."""
        ways: dict[On, int] = {}
        for on in sorted(self._cells, key=len, reverse=True):
            rest = [switch for switch in self.switches if switch not in on]
            ways[on] = sum(ways.get(on | {switch}, 0) for switch in rest) if rest else 1
        return ways

    def _contribution(self, switch: str) -> Weights:
        weights: Weights = {}
        for on in self._cells:
            added = on | {switch}
            if switch not in on and added in self._cells:
                share = self._before[on] * self._after[added] / self.orders
                _add(weights, self._cells[added], share)
                _add(weights, self._cells[on], -share)
        return _without_zeros(weights)

    def _interaction(self, first: str, second: str) -> Interaction | None:
        squares = list(self._squares(first, second))
        total = sum(count for _, count in squares)
        if not total:
            return None
        alone: Weights = {}
        beside: Weights = {}
        for on, count in squares:
            share = count / total
            _add(alone, self._cells[on | {second}], share)
            _add(alone, self._cells[on], -share)
            _add(beside, self._cells[on | {first, second}], share)
            _add(beside, self._cells[on | {first}], -share)
        contrast = dict(beside)
        for cell, weight in alone.items():
            _add(contrast, cell, -weight)
        if not _without_zeros(contrast):  # one of them changes nothing wherever both can be added
            return None
        return Interaction(
            first, second, _without_zeros(contrast), _without_zeros(alone), _without_zeros(beside)
        )

    def _squares(self, first: str, second: str) -> Iterator[tuple[On, int]]:
        """Combinations after which both can be added in either order, and the number of orders that do so."""
        for on in self._cells:
            corners = (on | {first}, on | {second}, on | {first, second})
            if not on & {first, second} and all(corner in self._cells for corner in corners):
                yield on, self._before[on] * self._after[corners[2]]


def waterfall(title: str, switches: Sequence[str], cell: Callable[[On], str | None]) -> Waterfall:
    """A waterfall over all combinations; `cell` returns the cell of each, or None if it has no meaning."""
    found = []
    for count in range(len(switches) + 1):
        for on in itertools.combinations(switches, count):
            name = cell(frozenset(on))
            if name is not None:
                found.append(Combination(on, name))
    return Waterfall(title, tuple(switches), tuple(found))


def _add(weights: Weights, cell: str, weight: float) -> None:
    weights[cell] = weights.get(cell, 0.0) + weight


def _without_zeros(weights: Weights) -> Weights:
    """Drop cells that cancel, which need not have run."""
    return {cell: weight for cell, weight in weights.items() if abs(weight) > 1e-12}
