"""A spec told as mathematics: its parallel formula in text and LaTeX, and its recurrence."""

from __future__ import annotations

from maclaurin.spec.attention_spec import AttentionSpec
from maclaurin.spec.denominator import Denominator, RowSum, RunningSum
from maclaurin.spec.kernel import Linear
from maclaurin.spec.norm import L2, RMS, Norm
from maclaurin.spec.part import written


def text_formula(spec: AttentionSpec) -> str:
    """y_t = p_t N( o_t Σ … / … ) with just the parts the spec has."""
    factors = "D_ts " if spec.forget_gate else ""
    gated = "i_s " if spec.input_gate else ""
    weight = "w_ts" if spec.window else spec.kernel.text("x_ts")
    weight = f"({weight})" if " " in weight and not weight.endswith(")") else weight
    body = f"Σ_s≤t {factors}{weight} {gated}v_s"
    if spec.denominator:
        body = f"{body} / {_text_denominator(spec.denominator, f'Σ_s≤t {factors}{weight}')}"
    body = f"o_t {body}" if spec.output_gate else body
    body = f"{_text_norm(spec.norm)}( {body} )" if spec.norm else body
    body = f"o_t {body}" if spec.gate_after_norm else body
    return "\n".join([f"y_t = {body}", *_where_text(spec)])


def _where_text(spec: AttentionSpec) -> list[str]:
    lines = [f"x_ts = {_score_text(spec)}"]
    if spec.window:
        lines.append(
            f"w_ts = exp(x_ts − r_t) for the last {spec.window.size} keys"
            + (f" and the first {spec.window.sinks}" if spec.window.sinks else "")
            + f", else {spec.kernel.text('x_ts')}"
        )
        lines.append(f"r_t = {_reference_text(spec)}")
    if spec.kernel.depends_on_row:
        lines.append("x̄ = mean of x_ts over " + ("the tail" if spec.window else "the visible keys"))
    if spec.forget_gate:
        lines.append("D_ts = Π_s<r≤t f_r")
    return lines


def _reference_text(spec: AttentionSpec) -> str:
    """Where the tail's expansion of e^(x − r) stands."""
    if not spec.kernel.depends_on_row:
        return "0"
    return "x̄ + u/2, u the variance of x_ts over the tail" if spec.kernel.notation == "hermite" else "x̄"


def _score_text(spec: AttentionSpec) -> str:
    kernel = spec.kernel
    feature = kernel.feature_map
    product = (
        "q_t·k_s" if feature is None else f"{feature.text.format(u='q_t')}·{feature.text.format(u='k_s')}"
    )
    if isinstance(kernel, Linear) and kernel.scale is not None:
        return product if kernel.scale == 1 else f"{written(kernel.scale)} {product}"
    return f"{product}/√d" if kernel.default_scale(4) == 0.5 else product


def _text_denominator(denominator: Denominator, row_sum: str) -> str:
    if isinstance(denominator, RowSum):
        body = row_sum if denominator.eps is None else f"{row_sum} + {written(denominator.eps)}"
        if denominator.floor is not None:
            body = f"max({body}, {written(denominator.floor)})"
        return f"detach({body})" if denominator.detach else f"({body})"
    if isinstance(denominator, RunningSum):
        body = "Σ_r≤t exp(g_r)"
        body = f"({body})" if denominator.floor is None else f"max({body}, {written(denominator.floor)})"
        return f"(t·{body})" if denominator.len else body
    return "t"


def _text_norm(norm: Norm) -> str:
    if isinstance(norm, L2) and norm.scale != 1:
        return f"{'e' if norm.scale == 'dim' else written(norm.scale)}·L2"
    if isinstance(norm, RMS) and norm.heads:
        return "RMS_heads"
    return {"l2": "L2", "rms": "RMS", "layer": "LayerNorm"}.get(norm.notation, norm.notation)


def latex_formula(spec: AttentionSpec) -> str:
    """The same as text_formula, for a paper."""
    factors = r"D_{ts}\, " if spec.forget_gate else ""
    gated = r"i_s\, " if spec.input_gate else ""
    weight = r"w_{ts}" if spec.window else rf"\left({spec.kernel.latex('x_{ts}')}\right)"
    body = rf"\sum_{{s\le t}} {factors}{weight}\, {gated}v_s"
    if spec.denominator:
        row_sum = rf"\sum_{{s\le t}} {factors}{weight}"
        body = rf"\frac{{{body}}}{{{_latex_denominator(spec.denominator, row_sum)}}}"
    body = rf"o_t\, {body}" if spec.output_gate else body
    body = rf"\mathrm{{{_latex_norm(spec.norm)}}}\!\left({body}\right)" if spec.norm else body
    body = rf"o_t\, {body}" if spec.gate_after_norm else body
    return r",\quad ".join([f"y_t = {body}", *_where_latex(spec)])


def _where_latex(spec: AttentionSpec) -> list[str]:
    parts = [f"x_{{ts}} = {_score_latex(spec)}"]
    if spec.window:
        sinks = f" and the first {spec.window.sinks}" if spec.window.sinks else ""
        parts.append(
            rf"w_{{ts}} = e^{{x_{{ts}}-r_t}} \text{{ for the last {spec.window.size} keys{sinks}, else }} "
            + spec.kernel.latex("x_{ts}")
        )
    if spec.forget_gate:
        parts.append(r"D_{ts} = \prod_{s<r\le t} f_r")
    return parts


def _score_latex(spec: AttentionSpec) -> str:
    kernel = spec.kernel
    feature = kernel.feature_map
    phi = "{u}" if feature is None else feature.latex
    product = rf"{phi.format(u='q_t')} \cdot {phi.format(u='k_s')}"
    if isinstance(kernel, Linear) and kernel.scale is not None:
        return product if kernel.scale == 1 else rf"{written(kernel.scale)}\, {product}"
    return rf"{product}/\sqrt d" if kernel.default_scale(4) == 0.5 else product


def _latex_denominator(denominator: Denominator, row_sum: str) -> str:
    if isinstance(denominator, RowSum):
        body = row_sum if denominator.eps is None else f"{row_sum} + {written(denominator.eps)}"
        return body if denominator.floor is None else rf"\max({body},\,{written(denominator.floor)})"
    if isinstance(denominator, RunningSum):
        body = r"\sum_{r\le t} e^{g_r}"
        body = body if denominator.floor is None else rf"\max({body},\,{written(denominator.floor)})"
        return rf"t\,{body}" if denominator.len else body
    return "t"


def _latex_norm(norm: Norm) -> str:
    return _text_norm(norm).replace("·", r"\cdot ").replace("_heads", "")


def text_recurrence(spec: AttentionSpec) -> str:
    """S_t = f_t S_{t−1} + …, y_t = …, for the orders the state holds."""
    if spec.orders is None and not spec.has_series:
        return "none: no finite state reproduces " + spec.kernel.text("x")
    orders = "n = 0, 1, 2, … (truncated at a certified order)" if spec.orders is None else _orders(spec)
    forget = "f_t " if spec.forget_gate else ""
    gated = "(i_t v_t)ᵀ" if spec.input_gate else "v_tᵀ"
    feature = spec.kernel.feature_map
    key = "k_t" if feature is None or feature.text == "{u}" else f"({feature.text.format(u='k_t')})"
    entering = "when k_t leaves the window: " if spec.window else ""
    lines = [f"{entering}S_t⁽ⁿ⁾ = {forget}S_t₋₁⁽ⁿ⁾ + {key}^⊗n {gated},   {orders}"]
    if spec.needs_row_sum:
        lines.append(f"z_t⁽ⁿ⁾ = {forget}z_t₋₁⁽ⁿ⁾ + {key}^⊗n")
    lines.append("y_t reads Σ_n a_n ⟨q_t^⊗n, S_t⁽ⁿ⁾⟩, then the denominator, gates and norm as above")
    return "\n".join(lines)


def _orders(spec: AttentionSpec) -> str:
    orders = spec.orders or ()
    return "n = " + ", ".join(map(str, orders)) if orders else "no orders (nothing is kept)"
