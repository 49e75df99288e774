"""The numbers of the explorer are those of the library, to 1e-9 in float64, in every form."""

import itertools
import math

import torch

from maclaurin import attention, parse
from maclaurin.forms.certificate import certified_order, output_error
from maclaurin.spec.part import registered
from tests.explorer.node import needs_node, run_in_node

pytestmark = needs_node
HEADS, TOKENS, D, E = 2, 9, 3, 2
TOLERANCE = 1e-9

KERNELS = [
    "exp", "exp(clamp=0.5)", "taylor(0)", "taylor(2)", "taylor(5)", "taylor(0,about=mean)",
    "taylor(1,about=mean)", "taylor(4,about=mean)", "hermite(0)", "hermite(1)", "hermite(2)", "hermite(4)",
    "power(0)", "power(2)", "power(3)",
    "poly(1,1,0.5)", "poly(0.2,0,-0.3,0.1)", "poly(0)", "linear(identity)", "linear(elu1)", "linear(relu)",
    "linear(cosine)", "linear(relu,clamp=0.4)", "linear(identity,scale=-0.7)", "sigmoid(-1.5)",
]  # fmt: skip
GATES = ["", "*in*forget"]
DENOMINATORS = [
    "", "/len", "/sum", "/sum(floor=1)", "/sum(eps=0.5)", "/sum(floor=2,eps=0.1,detach)",
    "/running", "/running(floor=3)", "/running(floor=3,len)", "/running(len)",
]  # fmt: skip
ENDS = [
    "",
    "*out",
    "/l2",
    "/l2(scale=dim)",
    "/l2(scale=2.5)",
    "/rms",
    "/rms(heads)",
    "/layer",
    "*out/rms",
    "/layer*out",
]
WINDOWS = [
    "+window(1)",
    "+window(3)",
    "+window(2,sinks=1)",
    "+window(4,sinks=2)",
    "+window(2,kept=1)",
    "+window(2,sinks=1,kept=3)",
]


def notations():
    """Every kernel, window, gate, denominator and norm, in compositions that mean something."""
    for kernel, gate in itertools.product(KERNELS, GATES):
        yield from (
            f"{kernel}{gate}{divisor}{end}" for divisor in ("", "/sum", "/len") for end in ("", "/l2")
        )
    for kernel in ("exp", "taylor(2)", "linear(elu1)"):
        yield from (f"{kernel}*in{divisor}{end}" for divisor in DENOMINATORS for end in ENDS)
    for kernel, window in itertools.product(
        ("taylor(2)", "taylor(2,about=mean)", "hermite(3)", "poly(0)"), WINDOWS
    ):
        yield from (f"{kernel}{window}{gate}{end}" for gate in GATES for end in ("/sum", "/l2"))


def specs():
    found = []
    for notation in dict.fromkeys(notations()):
        try:
            found.append(parse(notation))
        except ValueError:
            continue
    return found


def inputs(seed=7):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    gates = {
        "input_gate": torch.sigmoid(normal(1, TOKENS, HEADS)),
        "log_forget": torch.nn.functional.logsigmoid(normal(1, TOKENS, HEADS) + 1),
        "output_gate": torch.sigmoid(normal(1, TOKENS, HEADS)),
        "denominator_gate": normal(1, TOKENS, HEADS),
    }
    return normal(1, TOKENS, HEADS, D), normal(1, TOKENS, HEADS, D), normal(1, TOKENS, HEADS, E), gates


def heads_first(u):
    return u[0].transpose(0, 1).tolist()


def test_every_part_of_the_library_is_among_the_vectors():
    """A part that is added to the library is asked for here."""
    text = " ".join(notations())
    for family in ("kernel", "feature map", "window", "gate", "denominator", "norm"):
        shipped = [
            name for name, part in registered(family).items() if part.__module__.startswith("maclaurin.spec")
        ]
        assert [name for name in shipped if name not in text] == []


def test_every_spec_in_every_form(tmp_path):
    q, k, v, gates = inputs()
    cases = []
    for spec in specs():
        given = {name: gates[name] for name in spec.gates}
        for form in ("parallel", "chunked", "recurrent") if spec.has_finite_state else ("parallel",):
            y = attention(q, k, v, spec, form=form, chunk_size=4, **given)
            cases.append({"spec": str(spec), "form": form, "y": heads_first(y)})
    assert len(cases) > 500
    job = {
        "inputs": {
            **{name: heads_first(u) for name, u in (("q", q), ("k", k), ("v", v))},
            "gates": {name: heads_first(gate) for name, gate in gates.items()},
        },
        "cases": [{"spec": case["spec"], "form": case["form"]} for case in cases],
    }
    answers = run_in_node(
        tmp_path,
        """
        import { parse } from "./notation.js";
        import { attend } from "./maths.js";
        const answer = ({ inputs, cases }) =>
          cases.map(({ spec, form }) => attend(parse(spec), inputs, { form, chunk: 4 }).y);
        """,
        job,
    )
    wrong = {}
    for case, found in zip(cases, answers, strict=True):
        expected = torch.tensor(case["y"], dtype=torch.float64)
        off = (torch.tensor(found, dtype=torch.float64) - expected).abs().max() / expected.abs().max().clamp(
            min=1
        )
        if not off <= TOLERANCE:
            wrong[f"{case['spec']} {case['form']}"] = float(off)
    assert wrong == {}


def test_the_state_is_packed_as_the_library_packs_it(tmp_path):
    q, k, v, gates = inputs()
    _, state = attention(q, k, v, "taylor(3)*forget/l2", return_state=True, log_forget=gates["log_forget"])
    job = {
        **{name: heads_first(u) for name, u in (("q", q), ("k", k), ("v", v))},
        "gates": {name: heads_first(gate) for name, gate in gates.items()},
    }
    found = run_in_node(
        tmp_path,
        """
        import { parse } from "./notation.js";
        import { attend } from "./maths.js";
        const answer = (inputs) => ["recurrent", "chunked"].map((form) =>
          attend(parse("taylor(3)*forget/l2"), inputs, { form }).heads
            .map(({ state }) => [...state.values()].flat()));
        """,
        job,
    )
    for moments in torch.tensor(found, dtype=torch.float64):
        assert torch.allclose(moments[..., :E], state.moments[0], rtol=0, atol=TOLERANCE)


def test_certificates(tmp_path):
    asked = [(order, bound) for order in (0, 1, 4, 16) for bound in (0.0, 0.1, 1.0, 3.5, 12.0, 400.0)]
    bounds = [0.0, 0.5, 2.0, 5.0, 10.0, 20.0]
    found = run_in_node(
        tmp_path,
        """
        import { certifiedOrder, outputError } from "./maths.js";
        const answer = ({ asked, bounds }) => ({
          errors: asked.map(([n, r]) => { const e = outputError(n, r); return e === Infinity ? "inf" : e; }),
          orders: bounds.map((r) => certifiedOrder(r, 0.01)),
        });
        """,
        {"asked": asked, "bounds": bounds},
    )
    for (order, bound), error in zip(asked, found["errors"], strict=True):
        assert math.isclose(float(error), output_error(order, bound), rel_tol=TOLERANCE)
    certified = [certified_order(bound, 0.01) for bound in bounds]
    assert found["orders"] == [None if c is None else c.order for c in certified]


def test_one_row_of_scores(tmp_path):
    """Weights, terms and errors of the first panel, against taylor(N)/sum of the library."""
    draw = torch.Generator().manual_seed(3)
    x = 1.5 * torch.randn(6, generator=draw, dtype=torch.float64) - 1
    v = torch.randn(6, 4, generator=draw, dtype=torch.float64)
    found = run_in_node(
        tmp_path,
        """
        import { seriesOfRow, termsOfRow } from "./maths.js";
        const answer = ({ x, v }) => ({
          terms: termsOfRow(x, 40),
          ...Object.fromEntries(["zero", "mean"].map((about) => [about, seriesOfRow(x, v, about, 16)])),
        });
        """,
        {"x": x.tolist(), "v": v.tolist()},
    )
    terms = torch.tensor(found.pop("terms"), dtype=torch.float64)
    assert torch.allclose(terms.sum(0), x.softmax(-1), atol=TOLERANCE)
    exact = x.softmax(-1) @ v
    for about, row in found.items():
        centred = x - (x.mean() if about == "mean" else 0)
        assert torch.allclose(torch.tensor(row["exact"], dtype=torch.float64), x.softmax(-1), atol=TOLERANCE)
        for order, at in enumerate(row["orders"]):
            term = (centred**order / math.factorial(order)) @ v
            assert math.isclose(at["size"], term.norm() / (centred.exp() @ v).norm(), rel_tol=TOLERANCE)
            if order % 2:
                continue
            spec = f"taylor({order},about={about})/sum"
            y = attention(
                torch.ones(1, 1, 1, 1).double(), x[None, :, None, None], v[None, :, None], spec, scale=1.0
            )
            error = (y[0, 0, 0] - exact).abs().max() / v.abs().max()
            assert math.isclose(at["error"], error, rel_tol=1e-6, abs_tol=TOLERANCE)
            assert at["bound"] is None or at["error"] <= at["bound"]  # null: no certificate
