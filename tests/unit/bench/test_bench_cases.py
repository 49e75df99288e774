"""The list of cases is data: every promise of it can be read off."""

import itertools

import pytest

from maclaurin import parse
from maclaurin.bench.bench_record import Size
from maclaurin.bench.peers import _MAKERS
from maclaurin.bench.targets import PEER_TITLES, MemoryAgainst, TimeAgainst
from maclaurin.bench.workloads import all_cases, chosen_cases, packed_cuts
from maclaurin.errors import InputError, SpecError
from maclaurin.spec import feature_map

SHAPES = [Size.of(8, 16, 4096, 64), Size.of(8, 16, 4096, 128), Size.of(2, 16, 16384, 64)]


def case_named(name):
    return next(case for case in all_cases() if case.name == name)


@pytest.mark.parametrize("small", [False, True])
def test_names_tell_cases_apart_and_specs_are_written_well(small):
    cases = all_cases(small=small)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert str(parse(case.spec)) == case.spec
        assert case.targets


def test_small_cases_are_the_same_calls_on_fewer_tokens():
    full, small = all_cases(), all_cases(small=True)
    assert len(full) == len(small)
    assert {(c.group, c.form, c.kind, c.peers) for c in full} == {
        (c.group, c.form, c.kind, c.peers) for c in small
    }
    assert max(case.size.tokens for case in small) == 2048
    assert {c.size.d for c in full} == {c.size.d for c in small}


@pytest.mark.parametrize("small", [False, True])
def test_targets_name_peers_that_are_asked_and_exist(small):
    assert set(_MAKERS) == set(PEER_TITLES)
    for case in all_cases(small=small):
        assert set(case.peers) <= set(_MAKERS)
        for target in case.targets:
            if isinstance(target, (TimeAgainst, MemoryAgainst)):
                assert target.peer in case.peers


@pytest.mark.parametrize(
    ("size", "spec"),
    list(itertools.product(SHAPES, ["exp/sum", "exp/l2", "exp/rms", "exp/len", "exp/len*out", "exp/layer"])),
)
def test_the_exp_family_is_held_to_sdpa_in_time_and_memory(size, spec):
    texts = [target.text for target in case_named(f"{spec} {size}").targets]
    assert texts == [
        "forward ≤ 1.15 × cuDNN SDPA",
        "forward+backward ≤ 1.15 × cuDNN SDPA",
        "memory ≤ 1.2 × cuDNN SDPA",
        "first call ≤ 10 s",
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("exp(clamp=5)/len B2 H16 T16384 D64", "forward+backward ≤ 1 × FlexAttention"),
        ("exp*forget/sum B8 H16 T4096 D128", "forward ≤ 1 × FlexAttention"),
        ("poly(0)+window(512)/sum B8 H16 T4096 D64", "forward ≤ 1 × FlexAttention"),
        ("sigmoid(-6.93) B8 H16 T4096 D64", "forward ≤ 1 × FlexAttention"),
        ("taylor(4)/sum parallel B8 H16 T4096 D64", "forward+backward ≤ 1 × cuDNN SDPA"),
        ("linear(identity) B1 H8 T65536 D64", "forward ≤ 1 × fla chunk_linear_attn"),
        ("linear(elu1)/sum B8 H16 T4096 D64", "forward+backward ≤ 1.1 × fla chunk_linear_attn"),
        ("linear(identity)*forget B8 H16 T4096 D64", "forward+backward ≤ 1.4 × our linear(identity)"),
        ("taylor(2,about=mean)/sum B32 H16 T1024 D64", "forward+backward ≤ 1.4 × our taylor(2)/sum"),
        (
            "taylor(2,about=mean)+window(64,sinks=1)/sum B1 H32/8 T32768 D128",
            "forward+backward ≤ 1.8 × our taylor(2)/sum",
        ),
        ("power(2)*forget/sum B1 H8 T65536 D64", "forward+backward ≤ 1.3 × our taylor(2)/sum"),
        ("taylor(2)/sum not causal B8 H16 T4096 D64", "forward+backward ≤ 1.5 × our taylor(2)/sum"),
        ("taylor(2)/sum chunked B1 H32/8 T32768 D128", "forward+backward ≤ 0.5 × cuDNN SDPA"),
        ("taylor(2)/sum chunked B1 H8 T65536 D64", "forward+backward ≤ 4.2 ms on an H200"),
        ("taylor(2)/sum chunked B1 H8 T65536 D64", "memory ≤ 0.8 GB"),
        ("taylor(2)/sum chunked B8 H16 T4096 d16 e64", "forward+backward ≤ 0.25 × fla fused_chunk_based"),
        ("taylor(3)/l2 chunked B2 H16 T16384 d16 e64", "forward ≤ 1 × its own parallel form"),
        ("taylor(2)/sum packed B16 H16 T2048 D64", "forward+backward ≤ 1.2 × our equal rows"),
        ("taylor(2)/sum step B64 H16 T1 D64", "state traffic ≥ 80 % of a device copy"),
    ],
)
def test_other_targets(name, text):
    assert text in [target.text for target in case_named(name).targets]


@pytest.mark.parametrize("small", [False, True])
def test_the_sweep_has_as_many_tokens_at_every_length(small):
    swept = [case for case in all_cases(small=small) if case.in_sweep]
    assert len({case.size.batch * case.size.tokens for case in swept}) == 1
    for form in ("parallel", "chunked", "auto"):
        assert len({case.size.tokens for case in swept if case.form == form}) == 7


def test_packed_texts_are_uneven_and_as_many_tokens_as_equal_rows():
    packed = [case for case in all_cases() if case.kind == "packed"]
    assert {case.size.batch * case.size.tokens for case in packed} == {32768}
    cuts = packed_cuts(16, 32768)
    lengths = [b - a for a, b in itertools.pairwise(cuts)]
    assert sum(lengths) == 32768
    assert max(lengths) > 2 * min(lengths) > 0
    assert cuts == packed_cuts(16, 32768)


def test_every_feature_map_is_timed_with_every_denominator_it_allows():
    maps = {part.notation for part in vars(feature_map).values() if hasattr(part, "notation")}
    timed = {case.spec for case in all_cases() if str(case.size) == str(Size.of(8, 16, 4096, 64))}
    assert len(maps) == 4
    for mapped, denominator in itertools.product(maps, ("", "/sum", "/l2")):
        spec = f"linear({mapped}){denominator}"
        try:
            parse(spec)
        except SpecError:
            assert spec in ("linear(identity)/sum", "linear(cosine)/sum")
        else:
            assert spec in timed, spec


def test_a_window_about_the_mean_is_timed_at_every_length():
    spec = "taylor(2,about=mean)+window(64,sinks=1)/sum"
    sizes = {(c.size.batch, c.size.tokens, c.size.heads) for c in all_cases() if c.spec == spec}
    heads_of_64 = {(32, 1024, 16), (8, 4096, 16), (2, 16384, 16), (1, 65536, 8)}
    assert sizes == heads_of_64 | {(4, 8192, 32), (1, 32768, 32)}


def test_cases_are_chosen_by_any_part_of_their_name_or_group():
    cases = all_cases()
    assert chosen_cases(cases, []) == cases
    assert {c.spec for c in chosen_cases(cases, ["EXP/L2"])} == {"exp/l2"}
    assert {c.kind for c in chosen_cases(cases, ["decode"])} == {"step"}
    both = chosen_cases(cases, ["exp/l2", "decode"])
    assert len(both) == 5 + 2
    with pytest.raises(
        InputError, match=r"no case has 'exp/l3' in its name or group: maclaurin bench --list"
    ):
        chosen_cases(cases, ["exp/l2", "exp/l3"])
