// Panel 1: one row of attention as exp and as its series, order by order.

import { certifiedOrder, seriesOfRow } from "./maths.js";
import { byId, cell, clamped, drawing, h, linear, niceTicks, percent, placed, powerOfTen, s, shown } from "./draw.js";
import { HIGHEST, wordsOf } from "./settings.js";

const LADDER = [0, 1, 2, 4, 6, 8, 12, 16];
const CERTIFIED = 0.01;
const NAMES = { zero: "about zero", mean: "about the row’s mean" };

/** The current row: its words, scores and values. For the user's own scores, each key has its own value, so y is the weights. */
export function chosenRow(settings, capture) {
  if (settings.source === "own") {
    const tokens = wordsOf(settings.words);
    const given = settings.scores.split(",").map(Number);
    const x = tokens.map((_, i) => given[i] ?? 0);
    return { tokens, x, query: tokens.length - 1, v: tokens.map((_, i) => tokens.map((_, j) => Number(i === j))) };
  }
  const head = capture.heads[Math.min(settings.head, capture.heads.length - 1)];
  const query = Math.min(settings.query, capture.tokens.length - 1);
  return { tokens: capture.tokens, x: head.scores[query], query, v: head.values.slice(0, query + 1), head };
}

export function drawRow(settings, capture, act) {
  const row = chosenRow(settings, capture);
  const series = { zero: seriesOfRow(row.x, row.v, "zero", HIGHEST), mean: seriesOfRow(row.x, row.v, "mean", HIGHEST) };
  const about = settings.kernel === "exp" ? "mean" : settings.kernel;
  const isExp = settings.kernel === "exp";
  const weights = isExp ? series.mean.exact : series[about].orders[settings.order].weights;
  drawHeads(settings, capture, act);
  drawTokens(settings, row, weights, act);
  drawSliders(settings, row, act);
  byId("order").disabled = byId("order-number").disabled = isExp;
  drawLadder(settings, row, series[about], about, isExp, act);
  drawWeights(row, weights, series[about].exact, isExp);
  drawTerms(settings, series[about], about, isExp);
  drawErrors(settings, series, about, isExp);
  byId("row-says").replaceChildren(...sentences(settings, row, series, about, isExp));
}

// ------------------------------------------------------------------------------------------------- what is chosen

function drawHeads(settings, capture, act) {
  const isOwn = settings.source === "own";
  const chips = capture.heads.map((head, i) =>
    h("button", { type: "button", class: "chip", "aria-pressed": String(!isOwn && Math.min(settings.head, capture.heads.length - 1) === i), "data-head": i,
      onclick: () => act({ source: "head", head: i }) },
      h("b", {}, head.title), h("span", {}, `layer ${head.layer}, head ${head.head}`)));
  const own = h("button", { type: "button", class: "chip", "aria-pressed": String(isOwn), "data-head": "own", onclick: () => act({ source: "own" }) },
    h("b", {}, "my own scores"), h("span", {}, "move sliders"));
  keepingFocus(byId("heads"), "data-head", [...chips, own]);
  byId("model").textContent = `Scores of ${capture.model}, captured while it read the sentence.`;
}

/** Replace the children of an element and keep the focus. */
export function keepingFocus(place, key, children) {
  const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute(key) : null;
  place.replaceChildren(...children);
  if (focused !== null) place.querySelector(`[${key}="${focused}"]`)?.focus();
}

const visible = (token) => token.replace(/\n/g, "⏎").replace(/^ /, "") || "␣";

function drawTokens(settings, row, weights, act) {
  const isOwn = settings.source === "own";
  const buttons = row.tokens.map((token, i) => {
    const weight = weights[i];
    const state = i === row.query ? "query" : i > row.query ? "later" : "";
    const strength = weight === undefined ? 0 : clamped(Math.abs(weight), 0, 1) ** 0.6;
    const told = weight === undefined ? "not seen yet" : `weight ${shown(weight)}`;
    return h("button", {
      type: "button", class: `token ${state}${weight < 0 ? " negative" : ""}`, style: `--strength:${strength.toFixed(3)}`, "data-token": i,
      title: told, "aria-label": `${visible(token)}, ${told}`, "aria-pressed": String(i === row.query), disabled: isOwn,
      onclick: () => act({ query: i }),
    }, visible(token));
  });
  keepingFocus(byId("tokens"), "data-token", buttons);
  byId("tokens-hint").hidden = isOwn;
}

function drawSliders(settings, row, act) {
  const isOwn = settings.source === "own";
  byId("own").hidden = !isOwn;
  if (!isOwn) return;
  const change = (i, value) => act({ scores: row.x.map((x, j) => (i === j ? value : x)).join(",") });
  const sliders = row.tokens.map((token, i) =>
    h("label", { class: "slider" }, h("span", {}, token),
      h("input", { type: "range", min: -12, max: 12, step: 0.5, value: row.x[i], "data-slider": i, oninput: (event) => change(i, Number(event.target.value)) }),
      h("output", {}, shown(row.x[i]))));
  const place = byId("sliders");
  if (place.children.length === sliders.length && place.contains(document.activeElement)) {
    sliders.forEach((slider, i) => (place.children[i].querySelector("output").textContent = slider.querySelector("output").textContent));
    return; // do not replace a slider that is being dragged
  }
  place.replaceChildren(...sliders);
}

// ------------------------------------------------------------------------------------------------------- figures

function drawLadder(settings, row, series, about, isExp, act) {
  const place = byId("ladder");
  const label = 78;
  const rows = [...LADDER.map((n) => ({ n, name: `order ${n}`, at: series.orders[n] })), { n: null, name: "softmax", at: { weights: series.exact } }];
  const height = rows.length * 22 + 6;
  const { node, width } = drawing(place, height, `Weights of every key at orders ${LADDER.join(", ")} ${NAMES[about]}, and of softmax`);
  const step = (width - label - 4) / row.x.length;
  rows.forEach(({ n, name, at }, i) => {
    const isChosen = n === null ? isExp : !isExp && n === settings.order;
    const y = i * 22 + 3;
    const line = s("g", { class: `rung${isChosen ? " chosen" : ""}`, onclick: () => act(n === null ? { kernel: "exp" } : { order: n, kernel: isExp ? "mean" : settings.kernel }) });
    line.append(s("rect", { x: 0, y: y - 2, width, height: 22, class: "rung-ground" }));
    line.append(s("text", { x: label - 10, y: y + 13, class: "tick", "text-anchor": "end" }, name));
    at.weights.forEach((w, k) =>
      line.append(cell(label + k * step, y, Math.max(step - 1, 1), 18, w, 1, `${visible(row.tokens[k])}: ${shown(w)} at ${name}`)));
    node.append(line);
  });
  placed(place, node);
}

function drawWeights(row, weights, exact, isExp) {
  const place = byId("weights");
  const count = weights.length;
  const { node, width, height } = drawing(place, 250, "Weight of every key: bars for the chosen kernel, lines for softmax");
  const [left, right, top, bottom] = [40, 6, 12, width / count > 13 ? 62 : 22];
  const finite = weights.filter(Number.isFinite);
  const most = clamped(Math.max(...exact, ...finite) * 1.08, 0.1, 1.6);
  const least = clamped(Math.min(0, ...finite) * 1.08, -0.8, 0);
  const y = linear([least, most], [height - bottom, top]);
  const step = (width - left - right) / count;
  for (const tick of niceTicks(least, most, 7))
    node.append(s("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: tick === 0 ? "axis" : "grid" }),
      s("text", { x: left - 6, y: y(tick) + 4, class: "tick", "text-anchor": "end" }, shown(tick, 2)));
  weights.forEach((w, k) => {
    const x = left + k * step;
    const value = clamped(Number.isFinite(w) ? w : 0, least, most);
    const bar = s("rect", { x: x + step * 0.14, width: step * 0.72, y: Math.min(y(value), y(0)), height: Math.max(Math.abs(y(value) - y(0)), 0.5), class: w < 0 ? "bar below" : "bar above", rx: 1.5 });
    bar.append(s("title", {}, `${visible(row.tokens[k])}: ${shown(w)}, softmax ${shown(exact[k])}`));
    node.append(bar);
    if (value !== w) node.append(s("text", { x: x + step / 2, y: w > 0 ? top + 2 : height - bottom + 10, class: "tick", "text-anchor": "middle" }, w > 0 ? "▲" : "▼"));
    if (!isExp) node.append(s("line", { x1: x + 1, x2: x + step - 1, y1: y(exact[k]), y2: y(exact[k]), class: "exact" }));
    if (bottom > 40)
      node.append(s("text", { class: "tick", "text-anchor": "end", transform: `translate(${x + step / 2 + 4} ${height - bottom + 12}) rotate(-48)` }, visible(row.tokens[k]).slice(0, 9)));
  });
  placed(place, node);
}

function logAxis(node, y, from, to, left, right) {
  const every = Math.max(1, Math.ceil((to - from) / 7));
  for (let n = Math.ceil(from); n <= to; n++) {
    if (n % every) continue;
    node.append(s("line", { x1: left, x2: right, y1: y(n), y2: y(n), class: "grid" }),
      s("text", { x: left - 6, y: y(n) + 4, class: "tick", "text-anchor": "end" }, powerOfTen(n)));
  }
}

function drawTerms(settings, series, about, isExp) {
  const place = byId("terms");
  const { node, width, height } = drawing(place, 220, `Size of each order’s term ${NAMES[about]}, relative to the whole sum`);
  const [left, right, top, bottom] = [44, 6, 12, 24];
  const logs = series.orders.map(({ size }) => Math.log10(Math.max(size, 1e-12)));
  const [from, to] = [Math.max(-8, Math.min(-2, Math.floor(Math.min(...logs)))), Math.max(1, Math.ceil(Math.max(...logs)))];
  const y = linear([from, to], [height - bottom, top]);
  const step = (width - left - right) / logs.length;
  logAxis(node, y, from, to, left, width - right);
  logs.forEach((log, n) => {
    const isIn = isExp || n <= settings.order;
    const high = y(clamped(log, from, to));
    node.append(s("rect", { x: left + n * step + step * 0.14, width: step * 0.72, y: high, height: Math.max(height - bottom - high, 0.5), class: `bar ${isIn ? "above" : "unused"}`, rx: 1.5 },
      s("title", {}, `order ${n}: ${shown(series.orders[n].size)} of the whole sum${isIn ? "" : ", left out"}`)));
    if (n % 2 === 0) node.append(s("text", { x: left + (n + 0.5) * step, y: height - 8, class: "tick", "text-anchor": "middle" }, n));
  });
  node.append(s("line", { x1: left, x2: width - right, y1: y(0), y2: y(0), class: "axis" }));
  placed(place, node);
}

function drawErrors(settings, series, about, isExp) {
  const place = byId("errors");
  const { node, width, height } = drawing(place, 220, "Error of the output at every order, about zero and about the mean, with the certificate");
  const [left, right, top, bottom] = [44, 10, 12, 24];
  const [from, to] = [-8, 3];
  const y = linear([from, to], [height - bottom, top]);
  const x = linear([0, HIGHEST], [left + 6, width - right - 4]);
  const at = (value) => y(clamped(Math.log10(Math.max(value, 1e-300)), from, to));
  logAxis(node, y, from, to, left, width - right);
  if (!isExp) node.append(s("line", { x1: x(settings.order), x2: x(settings.order), y1: top, y2: height - bottom, class: "marker" }));
  for (const kind of ["zero", "mean"]) {
    const chosen = kind === about ? " chosen" : "";
    const { orders } = series[kind];
    const certified = orders.map(({ bound }, n) => [n, bound]).filter(([, bound]) => Number.isFinite(bound) && bound < 1e3);
    if (chosen && certified.length) node.append(s("path", { d: path(certified.map(([n, bound]) => [x(n), at(bound)])), class: "certificate" }));
    node.append(s("path", { d: path(orders.map(({ error }, n) => [x(n), at(error)])), class: `curve ${kind}${chosen}` }));
    orders.forEach(({ error, bound }, n) =>
      node.append(s("circle", { cx: x(n), cy: at(error), r: chosen ? 3.2 : 2.2, class: `point ${kind}${chosen}` },
        s("title", {}, `order ${n} ${NAMES[kind]}: off by ${shown(error)}, certified ${Number.isFinite(bound) ? shown(bound) : "nothing"}`))));
  }
  for (let n = 0; n <= HIGHEST; n += 2) node.append(s("text", { x: x(n), y: height - 8, class: "tick", "text-anchor": "middle" }, n));
  placed(place, node);
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// ------------------------------------------------------------------------------------------------------ sentences

function sentences(settings, row, series, about, isExp) {
  const chosen = series[about];
  const top = chosen.exact.indexOf(Math.max(...chosen.exact));
  const word = `“${visible(row.tokens[top])}”`;
  if (isExp)
    return [h("p", {}, h("b", {}, "exp, exactly. "), `The largest weight, ${percent(chosen.exact[top])}, is on ${word}. Choose a series to see how a finite recurrent network approximates it.`)];
  const at = chosen.orders[settings.order];
  const other = about === "mean" ? "zero" : "mean";
  const lines = [h("p", {}, h("b", {}, `Order ${settings.order} ${NAMES[about]}. `),
    `The output is off by ${percent(at.error)} of the largest value; ${NAMES[other]} it would be off by ${percent(series[other].orders[settings.order].error)}. `,
    `Softmax gives ${word} a weight of ${percent(chosen.exact[top])}, the series ${at.weights[top] < 0 ? shown(at.weights[top], 2) : percent(at.weights[top])}.`)];
  const order = certifiedOrder(chosen.reach, CERTIFIED);
  const from = `Scores reach ${shown(chosen.reach, 2)} from the centre ${shown(chosen.centre, 2)}`;
  const promise = Number.isFinite(at.bound)
    ? `so the certificate guarantees an error below ${shown(at.bound, 2)} of the largest value.`
    : order === null
      ? "so no order can be certified: the series’ terms are larger than float64 can cancel."
      : `so order ${settings.order} has no certificate; an error of 1 % is certified from order ${order} on.`;
  lines.push(h("p", {}, `${from}, ${promise}`));
  const isOdd = settings.order % 2 === 1 && !(settings.order === 1 && about === "mean");
  if (isOdd) lines.push(h("p", { class: "warning" }, `Order ${settings.order} is odd: its weights can be negative and their sum can vanish. The library rejects taylor(${settings.order})/sum; use an even order or a norm.`));
  return lines;
}
