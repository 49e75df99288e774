"""The laws of the algebra, for any spec: inherit them and name your specs.

    from maclaurin.testing import SpecLaws

    class TestMine(SpecLaws):
        specs = ["cosh(4)/sum", "cosh(4)/l2"]

Everything is checked in float64 with hypothesis over shapes, values and all gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from maclaurin.errors import InputError
from maclaurin.forms.features import feature_slices, symmetric_powers
from maclaurin.programs.series import SeriesNotice
from maclaurin.spec import AttentionSpec
from maclaurin.spec.catalogue import resolve
from maclaurin.testing.cases import Shape, TensorCase, random_tensors
from maclaurin.testing.dense_formula import PlainSeen, dense_output
from maclaurin.testing.printed_formula import printed_and_computed
from maclaurin.testing.tolerances import SERIES_TOLERANCE_OF_LAWS, assert_same, assert_same_gradients

#: features a state may have in a test
MOST_FEATURES = 700

_Test = TypeVar("_Test", bound=Callable[..., None])

seeds = st.integers(0, 2**31 - 1)
chunk_sizes = st.integers(1, 9)


@st.composite
def shapes(draw: st.DrawFn, spec: AttentionSpec, *, longest: int = 12, shortest: int = 1) -> Shape:
    """Any batch, length, heads and sizes for which the state stays small."""
    fitting = [d for d in (1, 2, 3, 4) if not spec.has_finite_state or spec.features(d) <= MOST_FEATURES]
    return Shape(
        batch=draw(st.integers(1, 3)),
        tokens=draw(st.integers(shortest, longest)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        d=draw(st.sampled_from(fitting if spec.highest_order <= 12 else fitting[:1])),
        e=draw(st.integers(3, 5)),
    )


@st.composite
def cuts(draw: st.DrawFn, tokens: int) -> list[tuple[int, int]]:
    """A sequence of this many tokens cut into consecutive, non-empty pieces."""
    inner = draw(st.sets(st.integers(1, tokens - 1), max_size=3)) if tokens > 1 else set()
    ends = [0, *sorted(inner), tokens]
    return list(itertools.pairwise(ends))


law = settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


def only_for(condition: Callable[[AttentionSpec], bool]) -> Callable[[_Test], _Test]:
    """A law that other specs do not have: no test of it is made for them."""

    def limited(test: _Test) -> _Test:
        test.applies_to = condition  # type: ignore[attr-defined]
        return test

    return limited


def _has_state(spec: AttentionSpec) -> bool:
    return spec.has_finite_state


def _carries(spec: AttentionSpec) -> bool:
    """Whether it has a state, directly or through its series."""
    return spec.has_finite_state or spec.has_series


def _keeps_keys(spec: AttentionSpec) -> bool:
    """Whether keys that leave the window may be kept, which the queries of a text decide together."""
    return spec.window is not None and spec.window.kept > 0


def _keeps_no_keys(spec: AttentionSpec) -> bool:
    return not _keeps_keys(spec)


class SpecLaws:
    """Every law that applies to a spec is a test of it, for every notation or catalogue name in `specs`."""

    specs: ClassVar[list[str]] = []

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test per law and spec."""
        if "notation" in metafunc.fixturenames:
            applies = getattr(metafunc.function, "applies_to", lambda spec: True)
            metafunc.parametrize("notation", [name for name in type(self).specs if applies(resolve(name))])

    # -------------------------------------------------------------------------------- the data

    def test_notation_and_json_round_trip(self, notation: str) -> None:
        """parse(str(spec)) == spec, and so for JSON."""
        spec = resolve(notation)
        assert resolve(str(spec)) == spec
        assert hash(resolve(str(spec))) == hash(spec)
        assert AttentionSpec.from_json(spec.to_json()) == spec

    @law
    @given(data=st.data(), seed=seeds)
    def test_simplified_spec_is_equal(self, notation: str, data: st.DataObject, seed: int) -> None:
        """spec and spec.simplified() give the same values and gradients."""
        spec = resolve(notation)
        simpler = spec.simplified()
        assert simpler.simplified() == simpler
        case = random_tensors(spec, data.draw(shapes(spec)), seed).with_gradients()
        kept = {n: t for n, t in case.tensors.items() if n in ("q", "k", "v", *simpler.gates)}
        _same_results(TensorCase(simpler, kept), TensorCase(spec, kept), {}, {}, reference_tensors=case)

    # ------------------------------------------------------------------------------- the kernel

    @only_for(_has_state)
    @law
    @given(data=st.data(), seed=seeds)
    def test_kernel_is_an_inner_product_of_features(
        self, notation: str, data: st.DataObject, seed: int
    ) -> None:
        """κ(q, k) = Σ_n a_n φ_n(q)·φ_n(k), the a_n computed from the row's moments if they depend on it."""
        spec = resolve(notation)
        shape = data.draw(shapes(spec))
        case = random_tensors(spec, shape, seed)
        q, k = case.tensors["q"][0, :, 0], case.tensors["k"][0, :, 0]
        phi = spec.kernel.feature_map
        q, k = (q, k) if phi is None else (phi(q), phi(k))
        x = q @ k.T
        orders = spec.orders
        moments = [(x**n).sum(-1, keepdim=True) for n in range(max(orders, default=0) + 1)]
        statistics = spec.kernel.statistics(moments) if spec.kernel.depends_on_row else None
        coefficients = spec.kernel.coefficients(statistics)
        read = torch.zeros_like(x)
        for n, place in zip(orders, feature_slices(q.shape[-1], orders), strict=True):
            powers = symmetric_powers(q, orders)[:, place] @ symmetric_powers(k, orders)[:, place].T
            assert_same(powers, x**n, f"φ_{n}(q)·φ_{n}(k) = (q·k)^{n}")
            read = read + coefficients[n] * powers
        assert_same(read, spec.kernel.weight(x, statistics), "κ = Σ a_n φ_n(q)·φ_n(k)")

    # ------------------------------------------------------------------------------ the formula

    @only_for(_keeps_no_keys)  # the formula has no kept keys
    @law
    @given(data=st.data(), seed=seeds)
    def test_the_answer_is_that_of_the_formula(self, notation: str, data: st.DataObject, seed: int) -> None:
        """The dense formula in float64, from the methods of the parts alone: values and gradients."""
        spec = resolve(notation)
        case = _case(spec, data, seed)
        expected = dense_output(spec, case.tensors)
        weights = torch.randn_like(expected)
        gradients = case.gradients((expected * weights).sum())
        for form in ("auto", "parallel"):
            y = case.output(form=form)
            assert_same(y, expected, f"{form} against the formula")
            assert_same_gradients(
                case.gradients((y * weights).sum()), gradients, f"{form} against the formula, "
            )

    @law
    @given(seed=seeds)
    def test_a_printed_formula_is_what_is_computed(self, notation: str, seed: int) -> None:
        """The text of every part, computed as it reads, is what the part computes; some texts cannot be."""
        spec = resolve(notation)
        for part, printed, computed in printed_and_computed(spec, seed):
            assert_same(printed.expand_as(computed), computed, f"the printed formula of {part.mark}{part}")

    @law
    @given(data=st.data(), seed=seeds)
    def test_parts_ignore_the_scales_they_say_they_ignore(
        self, notation: str, data: st.DataObject, seed: int
    ) -> None:
        """N(a·y) = N(y) where a norm ignores_row_scale; D(c·Σw, c) = c·D(Σw, 1) where D is_scaled.

        And D(c·Σw, 1) = c·D(Σw, 1) where a denominator ignores_row_scale.
        """
        spec, generator = resolve(notation), torch.Generator().manual_seed(seed)
        factor = data.draw(st.sampled_from([1e-6, 0.3, 7.0, 1e6]))

        def positive(*sizes: int) -> torch.Tensor:
            return torch.rand(*sizes, generator=generator, dtype=torch.float64) + 0.1

        if spec.norm is not None and spec.norm.ignores_row_scale:
            y = torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64)
            a = factor * (positive(2, 5, 3, 1) if spec.norm.per_head else positive(2, 5, 1, 1))
            assert_same(spec.norm(a * y), spec.norm(y), f"{spec.norm} ignores a factor")
        if spec.denominator is not None and spec.denominator.is_scaled:
            rows, argument = (positive(2, 3, 1, 5) for _ in range(2))
            one, scaled = (PlainSeen(positive(1, 1, 1, 5), rows, argument, unit) for unit in (1.0, factor))
            scaled = dataclasses.replace(scaled, keys=one.keys)
            divisor = spec.denominator.divisor
            assert_same(divisor(scaled), factor * divisor(one), f"{spec.denominator} is scaled")
        if spec.denominator is not None and spec.denominator.ignores_row_scale:
            one = PlainSeen(positive(1, 1, 1, 5), positive(2, 3, 1, 5), positive(2, 3, 1, 5))
            larger = dataclasses.replace(one, total=factor * one.total)
            divisor = spec.denominator.divisor
            assert_same(divisor(larger), factor * divisor(one), f"{spec.denominator} ignores a factor")

    # -------------------------------------------------------------------------------- the forms

    @law
    @given(data=st.data(), seed=seeds, chunk=chunk_sizes)
    def test_forms_agree_in_values_and_gradients(
        self, notation: str, data: st.DataObject, seed: int, chunk: int
    ) -> None:
        """parallel = chunked = recurrent."""
        spec = resolve(notation)
        case = _case(spec, data, seed)
        if _fits(spec, case):
            _same_results(case, case, {"form": "chunked", "chunk_size": chunk}, {"form": "parallel"})
        if _carries(spec):
            _same_results(case, case, {"form": "recurrent"}, {"form": "parallel"})

    @law
    @given(data=st.data(), seed=seeds, one=chunk_sizes, other=chunk_sizes)
    def test_chunk_size_never_changes_the_answer(
        self, notation: str, data: st.DataObject, seed: int, one: int, other: int
    ) -> None:
        """Any chunk size."""
        spec = resolve(notation)
        case = _case(spec, data, seed)
        assume(_fits(spec, case))
        _same_results(
            case, case, {"form": "chunked", "chunk_size": one}, {"form": "chunked", "chunk_size": other}
        )

    @only_for(_carries)
    @law
    @given(data=st.data(), seed=seeds, chunk=chunk_sizes)
    def test_any_cut_with_the_state_handed_over(
        self, notation: str, data: st.DataObject, seed: int, chunk: int
    ) -> None:
        """Piece by piece with the state = all at once, gradients through the state included."""
        spec = resolve(notation)
        case = _case(spec, data, seed)
        whole = case.output(**_options(spec, form="parallel"))
        weights = torch.randn_like(whole)
        expected = case.gradients((whole * weights).sum())
        for form in ("chunked", "recurrent"):
            options = _options(spec, form=form, chunk_size=chunk, return_state=True)
            options |= {"score_bound": _score_bound(case)} if spec.has_series else {}
            state, outputs = None, []
            for start, stop in data.draw(cuts(case.length)):
                y, state = case.tokens(start, stop)(state=state, **options)
                outputs.append(y)
            y = torch.cat(outputs, dim=1)
            assert_same(y, whole, f"{form} in pieces")
            assert_same_gradients(case.gradients((y * weights).sum()), expected, f"{form} in pieces, ")

    @only_for(lambda spec: not spec.has_order_of_time)
    @law
    @given(data=st.data(), seed=seeds)
    def test_not_causal_reads_every_key(self, notation: str, data: st.DataObject, seed: int) -> None:
        """causal=False: linear time = parallel, and the order of the keys does not matter."""
        spec = resolve(notation)
        case = _case(spec, data, seed)
        options = {"causal": False, "form": "parallel"}
        if _fits(spec, case):
            linear = {"causal": False, "form": "chunked", "chunk_size": 3}
            _same_results(case, case, linear, options)
        order = torch.randperm(case.length)
        keys = {n: t[:, order] for n, t in case.tensors.items() if n not in _of(spec, "tokens", "query")}
        assert_same(case.with_tensors(**keys).output(**options), case.output(**options), "permuted keys")

    # --------------------------------------------------------------------------------- symmetry

    @law
    @given(data=st.data(), seed=seeds)
    def test_no_output_sees_the_future(self, notation: str, data: st.DataObject, seed: int) -> None:
        """Outputs up to t do not change when later tokens do, in any form."""
        spec = resolve(notation)
        shape = data.draw(shapes(spec, shortest=2))
        case, other = random_tensors(spec, shape, seed), random_tensors(spec, shape, seed + 1)
        cut = data.draw(st.integers(1, shape.tokens - 1))
        changed = TensorCase(
            spec, {n: torch.cat([t[:, :cut], other.tensors[n][:, cut:]], 1) for n, t in case.tensors.items()}
        )
        for form in _forms(spec, case):
            options = _options(spec, form=form, chunk_size=4)
            assert_same(changed.output(**options)[:, :cut], case.output(**options)[:, :cut], form)

    @law
    @given(data=st.data(), seed=seeds)
    def test_later_tokens_of_any_size_change_nothing_before_them(
        self, notation: str, data: st.DataObject, seed: int
    ) -> None:
        """Finite values of any size in later tokens and gates: the same outputs and gradients before them.

        q, k and v are scaled alone and together. Features of keys may overflow, and products of values and
        gates; a product close to the largest number is left out, since its gradient overflows in any case.
        """
        spec = resolve(notation)
        shape = data.draw(shapes(spec, shortest=2))
        cut = data.draw(st.integers(1, shape.tokens - 1))
        sizes = [(2e3, 2e3), (1e6, 1e6), (1e9, 1e9), (1e18, 1e18), (1e22, 1e30)]
        if not spec.kernel.depends_on_row:  # of scores close to 1e19, the variance overflows in some rows
            sizes.append((1e19, 1e9))
        factor, of_gates = data.draw(st.sampled_from(sizes))
        scaled = data.draw(st.sampled_from(["qkv", "q", "k", "v"]))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
        case = random_tensors(spec, shape, seed, dtype).with_gradients()

        gate = data.draw(st.sampled_from([1.0, -of_gates, of_gates, 50.0, 3e4]))

        def larger(u: torch.Tensor) -> torch.Tensor:
            return torch.cat([u[:, :cut], u[:, cut:] * factor], 1)

        def larger_gate(u: torch.Tensor) -> torch.Tensor:
            later = u[:, cut:] if gate == 1.0 else torch.full_like(u[:, cut:], gate)
            return torch.cat([u[:, :cut], later], 1)

        weights = torch.randn(shape.batch, cut, shape.heads, shape.e)
        blocked = [] if _keeps_keys(spec) else ["blocked"]
        for form in [*_forms(spec, case), *blocked]:
            options = {"form": form, "chunk_size": data.draw(chunk_sizes)}
            y = case.output(**options)[:, :cut]
            if not y.isfinite().all():
                continue  # high powers overflow the dtype anyway
            changed = {n: larger(case.tensors[n]) for n in scaled}
            changed |= {n: larger_gate(case.tensors[n]) for n in spec.gates}
            after = case.with_tensors(**changed).output(**options)
            assert_same(after[:, :cut], y, form, 1e-6 if dtype is torch.float32 else 4e-3)
            if after.isfinite().all():
                got = case.gradients((after[:, :cut].float() * weights).sum())
                expected = case.gradients((y.float() * weights).sum())
                assert_same_gradients(got, expected, f"{form}: ")

    @law
    @given(data=st.data(), seed=seeds)
    def test_sequences_and_heads_do_not_see_each_other(
        self, notation: str, data: st.DataObject, seed: int
    ) -> None:
        """Permuting the batch, or the key-value heads with their queries, permutes the output."""
        spec = resolve(notation)
        shape = data.draw(shapes(spec))
        case = random_tensors(spec, shape, seed)
        rows = torch.randperm(shape.batch)
        heads = torch.randperm(shape.kv_heads)
        groups = (heads[:, None] * shape.group + torch.arange(shape.group)).flatten()
        by_query_head = _of(spec, "heads", "query")
        permuted = TensorCase(
            spec,
            {n: t[:, :, groups if n in by_query_head else heads] for n, t in case.tensors.items()},
        )
        for form in _forms(spec, case):
            options = _options(spec, form=form, chunk_size=4)
            y = case.output(**options)
            assert_same(case.map(lambda t: t[rows]).output(**options), y[rows], f"{form}: batch")
            assert_same(permuted.output(**options), y[:, :, groups], f"{form}: heads")

    @only_for(_keeps_no_keys)  # the queries of a key-value head choose together which keys it keeps
    @law
    @given(data=st.data(), seed=seeds)
    def test_grouped_heads_are_repeated_heads(self, notation: str, data: st.DataObject, seed: int) -> None:
        """Fewer key-value heads = each of them repeated for its queries."""
        spec = resolve(notation)
        shape = data.draw(shapes(spec))
        case = random_tensors(spec, shape, seed)
        shared = [n for n in case.tensors if n not in _of(spec, "heads", "query")]
        repeated = case.with_tensors(
            **{n: case.tensors[n].repeat_interleave(shape.group, dim=2) for n in shared}
        )
        for form in _forms(spec, case):
            options = _options(spec, form=form, chunk_size=4)
            assert_same(case.output(**options), repeated.output(**options), form)

    # ----------------------------------------------------------------------- padding and packing

    @law
    @given(data=st.data(), seed=seeds)
    def test_padding_is_as_if_it_were_not_there(self, notation: str, data: st.DataObject, seed: int) -> None:
        """Rows with padding anywhere = their real tokens alone, in values, gradients and state."""
        spec = resolve(notation)
        case = _case(spec, data, seed, shortest=2)
        mask = torch.tensor(
            data.draw(
                st.lists(
                    st.lists(st.booleans(), min_size=case.length, max_size=case.length).filter(any),
                    min_size=case.tensors["q"].shape[0],
                    max_size=case.tensors["q"].shape[0],
                )
            )
        )

        def with_garbage(t: torch.Tensor) -> torch.Tensor:
            return t.masked_fill(~mask.reshape(*mask.shape, *[1] * (t.dim() - 2)), torch.nan)

        for form in _forms(spec, case):
            options = _options(spec, form=form, chunk_size=3)
            y = case.map(with_garbage).output(key_padding_mask=mask, **options)
            weights = torch.randn_like(y)
            got = case.gradients((y * weights).sum())
            assert not y[~mask].any(), "an absent token has an output"
            loss = torch.zeros((), dtype=y.dtype)
            for row in range(mask.shape[0]):
                alone = case.map(lambda t, row=row: t[row : row + 1, mask[row]]).output(**options)  # type: ignore[misc]
                assert_same(y[row : row + 1, mask[row]], alone, f"{form}: row {row}")
                loss = loss + (alone * weights[row : row + 1, mask[row]]).sum()
            assert_same_gradients(got, case.gradients(loss), f"{form}: ")

    @law
    @given(data=st.data(), seed=seeds)
    def test_packed_sequences_are_separate(self, notation: str, data: st.DataObject, seed: int) -> None:
        """cu_seqlens = each sequence alone, in values and final states, empty ones included."""
        spec = resolve(notation)
        case = _case(spec, data, seed, shortest=2).map(lambda t: t[:1].detach())
        ends = [stop for _, stop in data.draw(cuts(case.length))]
        cu = torch.tensor([0, *ends[:1], *ends])  # one empty sequence among them
        for form in _forms(spec, case):
            options = _options(spec, form=form, chunk_size=3)
            carries = form != "parallel" and spec.has_finite_state
            result = case(cu_seqlens=cu, return_state=carries, **options)
            y, states = result if carries else (result, None)
            known = case.output(cu_seqlens=cu, max_seqlen=case.length, **options)
            assert_same(known, y, f"{form}: with max_seqlen")
            for i, (a, b) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
                if a == b:
                    continue
                alone = case.tokens(a, b)(return_state=carries, **options)
                alone, state = alone if carries else (alone, None)
                assert_same(y[:, a:b], alone, f"{form}: sequence {i}")
                if states is not None and state is not None:
                    assert_same(states[i].moments, state.moments, f"{form}: state of sequence {i}")
                    assert int(states[i].count) == b - a

    # -------------------------------------------------------------------------------- the state

    @only_for(_has_state)
    @law
    @given(data=st.data(), seed=seeds)
    def test_states_merge_and_roll_back(self, notation: str, data: st.DataObject, seed: int) -> None:
        """state(ab) = state(a).merge(state(b)); dropping b again gives state(a)."""
        spec = resolve(notation)
        case = random_tensors(spec, data.draw(shapes(spec, shortest=3)), seed)
        cut = data.draw(st.integers(1, case.length - 2))
        a, b, rest = case.tokens(0, cut), case.tokens(cut, case.length - 1), case.tokens(-1, case.length)
        first, second, both = a.state(), b.state(), case.tokens(0, case.length - 1).state()
        if _keeps_keys(spec):
            with pytest.raises(InputError, match="cannot be merged"):
                first.merge(second)
            return
        merged = first.merge(second)
        assert_same(rest.output(state=merged), rest.output(state=both), "output after a merge")
        assert_same(merged.moments, both.moments, "merged moments")
        if spec.irreversible_part is not None:
            return
        of_keys = {n: t for n, t in b.tensors.items() if n not in _of(spec, "tokens", "query")}
        back = both.rollback(of_keys.pop("k"), of_keys.pop("v"), gates=of_keys)
        assert_same(rest.output(state=back), rest.output(state=first), "output after a rollback", 1e-7)

    # ------------------------------------------------------------------------------ independence

    @only_for(lambda spec: spec.denominator is None or spec.denominator.has_gradient)
    @settings(law, max_examples=2)
    @given(data=st.data(), seed=seeds)
    def test_gradients_are_those_of_finite_differences(
        self, notation: str, data: st.DataObject, seed: int
    ) -> None:
        """Autograd against finite differences, for every argument."""
        spec = resolve(notation)
        shape = data.draw(shapes(spec, longest=4))
        case = random_tensors(spec, shape, seed).with_gradients()
        names = list(case.tensors)

        def output(*tensors: torch.Tensor) -> torch.Tensor:
            return TensorCase(spec, dict(zip(names, tensors, strict=True))).output(form="parallel")

        assert torch.autograd.gradcheck(output, tuple(case.tensors.values()), rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------- details


def _case(spec: AttentionSpec, data: st.DataObject, seed: int, shortest: int = 1) -> TensorCase:
    """Leaves with gradients; small scores and heads for exp, whose series must stay short."""
    shape = data.draw(shapes(spec, shortest=shortest))
    if spec.has_series and shape.d > 2:
        shape = type(shape)(**{**_fields(shape), "d": 2})
    return random_tensors(spec, shape, seed, size=0.3 if spec.has_series else 1.0).with_gradients()


def _of(spec: AttentionSpec, what: str, side: str) -> list[str]:
    """The tensors whose `what` (tokens or heads) are those of `side` (queries or keys)."""
    own = ["q"] if side == "query" else ["k", "v"]
    return own + [a.name for a in spec.arguments if getattr(a, what) == side]


def _fields(shape: Any) -> dict[str, int]:
    return {name: getattr(shape, name) for name in ("batch", "tokens", "kv_heads", "group", "d", "e")}


def _fits(spec: AttentionSpec, case: TensorCase) -> bool:
    return not spec.has_finite_state or spec.features(case.tensors["k"].shape[-1]) <= MOST_FEATURES


def _score_bound(case: TensorCase) -> float:
    """The largest score of the case, a promise for all its tokens."""
    q, k = (case.tensors[n].detach().transpose(1, 2) for n in "qk")
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
    return float(scores.abs().amax()) * abs(case.spec.kernel.default_scale(q.shape[-1])) * 1.001


def _forms(spec: AttentionSpec, case: TensorCase) -> list[str]:
    forms = ["parallel"]
    if _fits(spec, case):
        forms.append("chunked")
    if spec.has_finite_state and _fits(spec, case):
        forms.append("recurrent")
    return forms


def _options(spec: AttentionSpec, **options: Any) -> dict[str, Any]:
    return {**options, "tolerance": SERIES_TOLERANCE_OF_LAWS} if spec.has_series else options


def _same_results(
    one: TensorCase,
    other: TensorCase,
    one_options: dict[str, Any],
    other_options: dict[str, Any],
    reference_tensors: TensorCase | None = None,
) -> None:
    """Equal outputs and equal gradients of one random functional of them."""
    reference = other if reference_tensors is None else reference_tensors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SeriesNotice)
        y = one.output(**_options(one.spec, **one_options))
        expected = reference.output(**_options(reference.spec, **other_options))
    assert_same(y, expected, "output")
    weights = torch.randn_like(y)
    gradients = reference.gradients((expected * weights).sum())
    assert_same_gradients(one.gradients((y * weights).sum()), gradients, "")
