// Attention as numbers, for small heads in float64: kernels, feature maps, denominators, gates, norms, and the
// parallel, chunked and recurrent form of the same spec. Held to the Python library to 1e-9 by
// tests/explorer/test_maths.py. Heads first: q[h][t][i], gates[name][h][t].

import { FEATURES, PARTS, seriesOf } from "./notation.js";

const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);
export const dot = (a, b) => sum(a.map((x, i) => x * b[i]));
const norm2 = (u) => Math.sqrt(dot(u, u));
const scaled = (u, factor) => u.map((x) => x * factor);
const range = (n) => Array.from({ length: n }, (_, i) => i);
export const largestOf = (numbers) => numbers.reduce((largest, x) => Math.max(largest, x), -Infinity);

// -------------------------------------------------------------------------------------------- features, scores

/** φ of a feature map. */
export function mapped(feature, u) {
  if (feature === "elu1") return u.map((x) => Math.max(x, 0) + Math.exp(-Math.max(-x, 0)));
  if (feature === "relu") return u.map((x) => Math.max(x, 0));
  if (feature === "cosine") return scaled(u, 1 / (norm2(u) || 1));
  return u;
}

/** The factor on φ(q)·φ(k). */
export function scaleOf(kernel, d) {
  if (kernel.name !== "linear") return 1 / Math.sqrt(d);
  if (kernel.scale !== null) return kernel.scale;
  return FEATURES[kernel.feature].score("").endsWith("√d") ? 1 / Math.sqrt(d) : 1;
}

/** Monomials of order n over the entries of u, one per multiset, weighted so that φₙ(q)·φₙ(k) = (q·k)ⁿ. */
export function symmetricPower(u, n) {
  const found = [];
  const walk = (first, left, product, weight, run) => {
    if (left === 0) return void found.push(product * Math.sqrt(weight));
    for (let i = first; i < u.length; i++) {
      const again = i === first && run > 0 ? run + 1 : 1;
      walk(i, left - 1, product * u[i], (weight * (n - left + 1)) / again, again);
    }
  };
  walk(0, n, 1, 1, 0);
  return found;
}

/** The multisets behind the entries of symmetricPower, as lists of indices. */
export function multisetsOf(d, n) {
  const found = [];
  const walk = (first, chosen) => {
    if (chosen.length === n) return void found.push(chosen);
    for (let i = first; i < d; i++) walk(i, [...chosen, i]);
  };
  walk(0, []);
  return found;
}

// ----------------------------------------------------------------------------------------------------- kernels

/** Σ aₙ xⁿ, from the highest order down. */
export const horner = (coefficients, x) => coefficients.reduceRight((total, a) => total * x + a, 0);

const LEAST_MASS = 1e-30;
const perKey = (total, mass) => (mass <= LEAST_MASS ? 0 : total / mass);

function choose(n, j) {
  let number = 1;
  for (let i = 0; i < j; i++) number = (number * (n - i)) / (i + 1);
  return number;
}

/** The aⱼ of Σ bₙ (x − c)ⁿ = Σ aⱼ xʲ. */
export function recentred(coefficients, c) {
  return coefficients.map((_, j) =>
    sum(coefficients.slice(j).map((b, i) => b * choose(i + j, j) * (-c) ** i)));
}

/** What a kernel that depends on its row knows of it, from z₀, z₁, …; null for the others. */
export function statisticsOf(kernel, moments) {
  if (!PARTS[kernel.name].dependsOnRow(kernel)) return null;
  const mean = perKey(moments[1], moments[0]);
  return kernel.name === "taylor" ? { mean } : hermiteStatistics(kernel.order, moments, mean);
}

function hermiteStatistics(order, moments, mean) {
  const central = range(moments.length).map((n) =>
    perKey(sum(range(n + 1).map((j) => choose(n, j) * moments[j] * (-mean) ** (n - j))), moments[0]));
  const variance = order > 1 ? central[2] : 0;
  const polynomials = [[1], [0, 1]];
  for (let n = 1; n < order; n++) {
    const lowered = [...polynomials[n - 1].map((b) => n * variance * b), 0, 0];
    polynomials.push([0, ...polynomials[n]].map((a, i) => a - lowered[i]));
  }
  const coefficients = [1, ...Array(order).fill(0)];
  let factorial = 1;
  for (let n = 1; n <= order; n++) {
    factorial *= n;
    const own = sum(polynomials[n].map((b, j) => b * (j === 0 ? 1 : j === 1 ? 0 : central[j])));
    polynomials[n].forEach((b, j) => (coefficients[j] += b / factorial));
    coefficients[0] -= own / factorial;
  }
  return { mean, variance, coefficients };
}

/** κ as Σ aₙ xⁿ: its coefficients, given the statistics of the row. */
export function coefficientsOf(kernel, statistics) {
  if (kernel.name === "hermite") return statistics ? recentred(statistics.coefficients, statistics.mean) : [1];
  if (kernel.name === "taylor" && statistics)
    return kernel.order ? recentred(seriesOf(kernel), statistics.mean) : [1, 0];
  return seriesOf(kernel);
}

/** κ at one score. */
export function weightOf(kernel, x, statistics = null) {
  switch (kernel.name) {
    case "exp": return Math.exp(kernel.clamp === null ? x : Math.min(x, kernel.clamp));
    case "sigmoid": return 1 / (1 + Math.exp(-(x + kernel.bias)));
    case "linear": return kernel.clamp === null ? x : Math.min(x, kernel.clamp);
    case "hermite": return statistics ? horner(statistics.coefficients, x - statistics.mean) : 1;
    default: return horner(seriesOf(kernel), statistics ? x - statistics.mean : x);
  }
}

/** The point r for which κ(x) stands for e^(x − r) beside exact keys. */
export function referenceOf(kernel, statistics) {
  if (!statistics) return 0;
  return kernel.name === "hermite" ? statistics.mean + statistics.variance / 2 : statistics.mean;
}

// ------------------------------------------------------------------------------------------------ one head's rows

/** Queries (with the scale), keys, values (with their input gate) and running totals of the log forget gate. */
function streamOf(spec, inputs, head) {
  const feature = PARTS[spec.kernel.name].feature(spec.kernel);
  const [q, k] = [inputs.q[head], inputs.k[head]].map((u) => u.map((row) => mapped(feature, row)));
  const scale = inputs.scale ?? scaleOf(spec.kernel, q[0].length);
  const gate = spec.valueGates.length ? inputs.gates.input_gate[head] : null;
  let total = 0;
  return {
    q: q.map((row) => scaled(row, scale)),
    k,
    v: inputs.v[head].map((row, s) => (gate ? scaled(row, gate[s]) : row)),
    decayed: q.map((_, t) => (spec.decayGates.length ? (total += Math.max(inputs.gates.log_forget[head][t], -200)) : 0)),
  };
}

const isNear = (window, s, t) => window !== null && (s < window.sinks || s > t - window.size);

/**
 * Which keys are exact for each query: those of the window, the sinks, and of the keys that have left the window
 * the `kept` that received most attention in it; of equal ones the later.
 */
function exactKeys(spec, stream) {
  const { window } = spec;
  const near = stream.q.map((_, t) => range(t + 1).map((s) => isNear(window, s, t)));
  if (!window?.kept) return near;
  const received = stream.q.map(() => 0);
  stream.q.forEach((query, t) => {
    const keys = range(t + 1).filter((s) => near[t][s]);
    const shares = softmax(keys.map((s) => dot(query, stream.k[s]) + stream.decayed[t] - stream.decayed[s]));
    keys.forEach((s, i) => (received[s] += shares[i]));
  });
  return near.map((row) => {
    const left = row.flatMap((isIn, s) => (isIn ? [] : [s]));
    const kept = left.sort((a, b) => received[b] - received[a] || b - a).slice(0, window.kept);
    return row.map((isIn, s) => isIn || kept.includes(s));
  });
}

/** Σ_s w_s v_s and Σ_s w_s of every query, both times e^(−logScale), and the weights themselves. */
export function parallelRows(spec, stream) {
  const exact = exactKeys(spec, stream);
  return stream.q.map((query, t) => {
    const x = range(t + 1).map((s) => dot(query, stream.k[s]));
    const decay = range(t + 1).map((s) => stream.decayed[t] - stream.decayed[s]);
    return rowOf(spec, x, decay, stream.v, exact[t]);
  });
}

/** One row from its scores and log decays. */
function rowOf(spec, x, decay, v, isExact) {
  const kernel = spec.kernel;
  if (kernel.name === "exp") {
    const logits = x.map((score, s) => (kernel.clamp === null ? score : Math.min(score, kernel.clamp)) + decay[s]);
    const logScale = largestOf(logits);
    return finishedRow(logits.map((logit) => Math.exp(logit - logScale)), v, logScale);
  }
  const mass = x.map((_, s) => (isExact[s] ? 0 : Math.exp(decay[s])));
  const highest = Math.max(0, ...spec.orders);
  const moments = range(highest + 1).map((n) => sum(x.map((score, s) => (mass[s] ? mass[s] * score ** n : 0))));
  const statistics = statisticsOf(kernel, moments);
  const weights = x.map((score, s) => (mass[s] ? mass[s] * weightOf(kernel, score, statistics) : 0));
  if (!spec.window) return { ...finishedRow(weights, v, null), statistics };
  const exact = x.flatMap((score, s) => (isExact[s] ? [[s, score + decay[s] - referenceOf(kernel, statistics)]] : []));
  const logScale = Math.max(0, largestOf(exact.map(([, logit]) => logit)));
  weights.forEach((w, s) => (weights[s] = w * Math.exp(-logScale)));
  for (const [s, logit] of exact) weights[s] = Math.exp(logit - logScale);
  return { ...finishedRow(weights, v, logScale), statistics };
}

function finishedRow(weights, v, logScale) {
  const numerator = v[0].map((_, c) => sum(weights.map((w, s) => w * v[s][c])));
  return { numerator, rowSum: sum(weights), logScale, weights };
}

/**
 * The chunked form; with chunks of one token the recurrent one. A state holds Σ_s D φₙ(k_s) [v_s, 1]ᵀ of the keys
 * before the chunk, those of the chunk are weighed one by one; `steps` tells what happened at each token.
 */
export function stateRows(spec, stream, chunk) {
  const exact = exactKeys(spec, stream);
  const columns = (s) => [...stream.v[s], 1];
  const decayTo = (t, s) => Math.exp(stream.decayed[t] - stream.decayed[s]);
  const state = new Map(spec.orders.map((n) => [n, symmetricPower(stream.k[0], n).map(() => columns(0).map(() => 0))]));
  const inState = new Set();
  const entering = (t) => range(t + 1).filter((s) => !exact[t][s] && !inState.has(s)); // a key that is in the tail stays in it
  const write = (s, t) => {
    inState.add(s);
    return new Map([...state].map(([n, rows]) => {
      const added = symmetricPower(stream.k[s], n).map((a) => columns(s).map((b) => decayTo(t, s) * a * b));
      rows.forEach((row, i) => row.forEach((_, c) => (row[c] += added[i][c])));
      return [n, added];
    }));
  };
  const steps = [];
  const isStep = chunk === 1;
  for (let start = 0; start < stream.q.length; start += chunk) {
    const stop = Math.min(start + chunk, stream.q.length);
    const before = start ? stream.decayed[start - 1] : 0;
    for (let t = start; t < stop; t++) {
      let written = null;
      if (isStep) {
        decayState(state, Math.exp(stream.decayed[t] - before));
        for (const s of entering(t)) written = write(s, t);
      }
      const fade = isStep ? 1 : Math.exp(stream.decayed[t] - before);
      const sums = new Map(spec.orders.map((n) => [n, readState(state.get(n), symmetricPower(stream.q[t], n), fade)]));
      for (const s of entering(t)) addKey(sums, dot(stream.q[t], stream.k[s]), decayTo(t, s), columns(s));
      steps.push({ ...rowFromSums(spec, stream, sums, t, exact[t]), written, state: isStep ? copyOf(state) : null });
    }
    if (isStep) continue;
    decayState(state, Math.exp(stream.decayed[stop - 1] - before));
    for (const s of entering(stop - 1)) write(s, stop - 1);
  }
  return { steps, state };
}

const copyOf = (state) => new Map([...state].map(([n, rows]) => [n, rows.map((row) => [...row])]));

function decayState(state, factor) {
  for (const rows of state.values()) for (const row of rows) row.forEach((_, c) => (row[c] *= factor));
}

const readState = (rows, query, fade) => rows[0].map((_, c) => fade * sum(query.map((a, i) => a * rows[i][c])));

function addKey(sums, x, mass, columns) {
  for (const [n, total] of sums) columns.forEach((b, c) => (total[c] += mass * x ** n * b));
}

/** A row from Σ_s D xⁿ [v, 1] of its tail for every order, and the exact keys beside it. */
function rowFromSums(spec, stream, sums, t, isExact) {
  const kernel = spec.kernel;
  const highest = Math.max(0, ...spec.orders);
  const moments = range(highest + 1).map((n) => sums.get(n)?.at(-1) ?? 0);
  const statistics = statisticsOf(kernel, moments);
  const coefficients = coefficientsOf(kernel, statistics);
  const parts = new Map([...sums].map(([n, total]) => [n, scaled(total, coefficients[n] ?? 0)]));
  const total = [...stream.v[0], 1].map((_, c) => sum([...parts.values()].map((part) => part[c])));
  const row = { numerator: total.slice(0, -1), rowSum: total.at(-1), logScale: null, statistics, parts };
  if (!spec.window) return row;
  const exact = range(t + 1).filter((s) => isExact[s]);
  const logits = exact.map((s) => dot(stream.q[t], stream.k[s]) + stream.decayed[t] - stream.decayed[s] - referenceOf(kernel, statistics));
  const logScale = Math.max(0, largestOf(logits));
  const [shrink, weights] = [Math.exp(-logScale), logits.map((logit) => Math.exp(logit - logScale))];
  return {
    ...row, logScale,
    numerator: row.numerator.map((a, c) => a * shrink + sum(exact.map((s, i) => weights[i] * stream.v[s][c]))),
    rowSum: row.rowSum * shrink + sum(weights),
  };
}

// ------------------------------------------------------------------------- denominator, gates and norm of all heads

/** p_t N( o_t Σ w v / D_t ): y[h][t] and everything on the way to it, by form "parallel", "chunked" or "recurrent". */
export function attend(spec, inputs, { form = "parallel", chunk = 4 } = {}) {
  const heads = range(inputs.q.length).map((h) => {
    const stream = streamOf(spec, inputs, h);
    if (form === "parallel" || spec.kernel.name === "exp") return { rows: parallelRows(spec, stream) };
    const { steps, state } = stateRows(spec, stream, form === "recurrent" ? 1 : chunk);
    return { rows: steps, state };
  });
  const tokens = inputs.q[0].length;
  const divided = heads.map(({ rows }, h) => rows.map((row, t) => dividedRow(spec, inputs, row, h, t, commonScale(spec, heads, t))));
  const y = heads.map(() => []);
  for (const t of range(tokens)) {
    const before = divided.map((rows, h) => gated(spec.gatesBeforeNorm, rows[t], inputs, h, t));
    normed(spec.norm, before).forEach((row, h) => y[h].push(gated(spec.gatesAfterNorm, row, inputs, h, t)));
  }
  return { y, heads, divided };
}

/** A norm over the heads sees the ratios of their scales only. */
function commonScale(spec, heads, t) {
  return spec.norm && !spec.ignoresRowScale ? largestOf(heads.map(({ rows }) => rows[t].logScale ?? 0)) : 0;
}

function dividedRow(spec, inputs, row, h, t, common) {
  const divisor = spec.denominator;
  if (divisor?.name === "sum") return scaled(row.numerator, 1 / rowSumDivisor(divisor, row));
  const logGain = spec.ignoresRowScale || row.logScale === null ? 0 : row.logScale - common;
  return scaled(row.numerator, Math.exp(logGain - logDivisor(divisor, inputs, h, t)));
}

function rowSumDivisor({ floor, eps }, row) {
  const unit = row.logScale === null ? 1 : Math.exp(-row.logScale);
  let total = row.rowSum + (eps === null ? 0 : unit * eps);
  if (floor !== null) total = Math.max(total, unit * floor);
  return total === 0 ? 1 : total;
}

function logDivisor(divisor, inputs, h, t) {
  if (divisor === null) return 0;
  if (divisor.name === "len") return Math.log(t + 1);
  const logs = inputs.gates.denominator_gate[h].slice(0, t + 1);
  const top = largestOf(logs);
  let total = top + Math.log(sum(logs.map((g) => Math.exp(g - top))));
  if (divisor.floor !== null) total = Math.max(total, Math.log(divisor.floor));
  return divisor.len ? total + Math.log(t + 1) : total;
}

function gated(gates, row, inputs, h, t) {
  return gates.length ? scaled(row, inputs.gates.output_gate[h][t]) : row;
}

/** N of one token's rows, one per head. */
export function normed(norm, rows) {
  if (norm === null) return rows;
  const e = rows[0].length;
  if (norm.name === "rms" && norm.heads) {
    const length = norm2(rows.flat()) || 1;
    return rows.map((row) => scaled(row, Math.sqrt(e * rows.length) / length));
  }
  return rows.map((row) => {
    const mean = norm.name === "layer" ? sum(row) / e : 0;
    const centred = row.map((a) => a - mean);
    const top = largestOf(centred.map(Math.abs)) || 1; // no square overflows or vanishes
    const unit = centred.map((a) => a / top);
    const length = norm.name === "l2" ? (norm.scale === "dim" ? e : norm.scale) : Math.sqrt(e);
    return scaled(unit, length / (norm2(unit) || 1));
  });
}

// ------------------------------------------------------------------------------------------------- certificates

const UNIT_ROUNDOFF = 2 ** -53;

/** R^{N+1} e^R/(N+1)! and rounding: the largest relative error of a weight of order N for |x| ≤ R. */
export function weightError(order, bound) {
  if (bound === 0) return 0;
  const logFactorial = sum(range(order + 1).map((i) => Math.log(i + 1)));
  const log = (order + 1) * Math.log(bound) + bound - logFactorial;
  const rounding = 16 * (order + 1) * UNIT_ROUNDOFF * Math.exp(Math.min(2 * bound, 700));
  return (log < 700 ? Math.exp(log) : Infinity) + rounding;
}

/** 2ε/(1−ε): what the output over a row sum can be off by, relative to max|v|. */
export function outputError(order, bound) {
  const epsilon = weightError(order, bound);
  return epsilon < 1 ? (2 * epsilon) / (1 - epsilon) : Infinity;
}

/** The smallest even order whose certificate is within the tolerance; null if float64 allows none. */
export function certifiedOrder(bound, tolerance) {
  for (let order = 0; order <= 170; order += 2) if (outputError(order, bound) <= tolerance) return order;
  return null;
}

// ---------------------------------------------------------------------------------------------- one row of scores

/**
 * The series of exp over one row: weights, size of each order's term and error of the output for every order up to
 * `highest`, about zero or about the mean. Sizes are ‖Σ cⁿ v/n!‖ relative to ‖Σ e^c v‖, c = x − centre.
 */
export function seriesOfRow(x, v, about, highest) {
  const centre = about === "mean" ? sum(x) / x.length : 0;
  const c = x.map((score) => score - centre);
  const exact = softmax(x);
  const output = combined(exact, v);
  const biggest = largestOf(v.flat().map(Math.abs)) || 1;
  const scale = largestOf(c);
  const logSize = scale + Math.log(norm2(combined(c.map((a) => Math.exp(a - scale)), v)) || 1e-300);
  const powers = c.map(() => 1);
  const running = c.map(() => 0);
  const orders = range(highest + 1).map((n) => {
    if (n) powers.forEach((p, s) => (powers[s] = (p * c[s]) / n));
    powers.forEach((p, s) => (running[s] += p));
    const total = sum(running);
    const weights = running.map((w) => w / total);
    const off = combined(weights, v).map((a, i) => Math.abs(a - output[i]));
    return {
      weights, rowSum: total,
      size: Math.exp(Math.log(norm2(combined(powers, v)) || 1e-300) - logSize),
      error: largestOf(off) / biggest,
      bound: outputError(n, largestOf(c.map(Math.abs))),
    };
  });
  return { centre, reach: largestOf(c.map(Math.abs)), exact, orders };
}

/** The weights that each order adds about the mean, (x − x̄)ⁿ/n! over Σ e^(x − x̄): with all of them, softmax. */
export function termsOfRow(x, count) {
  const mean = sum(x) / x.length;
  const total = sum(x.map((score) => Math.exp(score - mean)));
  const terms = [x.map(() => 1 / total)];
  for (let n = 1; n < count; n++) terms.push(terms[n - 1].map((w, i) => (w * (x[i] - mean)) / n));
  return terms;
}

export function softmax(x) {
  const top = largestOf(x);
  const raised = x.map((score) => Math.exp(score - top));
  return scaled(raised, 1 / sum(raised));
}

const combined = (weights, v) => v[0].map((_, i) => sum(weights.map((w, s) => w * v[s][i])));

// ------------------------------------------------------------------------------------------------------- numbers

/** Normal numbers that are the same for the same seed. */
export function normalNumbers(seed) {
  let state = seed >>> 0;
  const uniform = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return (((t ^ (t >>> 14)) >>> 0) + 0.5) / 4294967296;
  };
  return () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
}
