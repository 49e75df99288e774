// Panel 2: the recurrent network at work, one token at a time, and the same numbers in the other two forms.

import { attend, largestOf, multisetsOf, normalNumbers } from "./maths.js";
import { parse } from "./notation.js";
import { byId, bytes, cell, drawing, h, linear, niceTicks, placed, s, shown } from "./draw.js";
import { keepingFocus } from "./row.js";
import { wordsOf } from "./settings.js";

export const VALUE_SIZE = 2;

/** q, k and v of a sentence: the same word has the same vectors, drawn from the seed. */
export function wordVectors(words, d, e, seed) {
  const drawn = new Map();
  for (const word of words)
    if (!drawn.has(word)) {
      const letters = [...word].reduce((number, letter) => Math.imul(number, 31) + letter.codePointAt(0), 7);
      const next = normalNumbers(Math.imul(letters, 2654435761) + seed * 97);
      const vector = (size) => Array.from({ length: size }, next);
      drawn.set(word, { q: vector(d), k: vector(d), v: vector(e) });
    }
  const all = (name) => [words.map((word) => drawn.get(word)[name])];
  return { q: all("q"), k: all("k"), v: all("v"), gates: {} };
}

export function networkSpec({ net, about }) {
  const isSafe = net % 2 === 0 || (net === 1 && about === "mean");
  return parse(`taylor(${net}${about === "mean" ? ",about=mean" : ""})${isSafe ? "/sum" : "/l2"}`);
}

export function drawNetwork(settings, act) {
  const words = wordsOf(settings.sentence);
  const spec = networkSpec(settings);
  const inputs = wordVectors(words, settings.size, VALUE_SIZE, settings.seed);
  const forms = Object.fromEntries(["parallel", "chunked", "recurrent"].map((form) => [form, attend(spec, inputs, { form, chunk: settings.chunk })]));
  const t = Math.min(settings.step, words.length) - 1;
  byId("step").max = words.length;
  byId("step").value = t + 1;
  byId("step-says").textContent = `token ${t + 1} of ${words.length}: “${words[t]}”`;
  byId("chunk-row").hidden = settings.form !== "chunked";
  byId("net-notation").textContent = spec.notation;
  drawWords(words, t, act);
  drawOrders(settings, spec, forms.recurrent, t);
  drawMatrix(settings, spec, forms.parallel, words, t);
  drawAgreement(settings, forms, t);
  drawMemory(settings, spec, words.length, t);
}

function drawWords(words, t, act) {
  keepingFocus(byId("net-tokens"), "data-token", words.map((word, i) =>
    h("button", { type: "button", class: `token ${i === t ? "query" : i > t ? "later" : ""}`, "data-token": i, "aria-pressed": String(i === t), onclick: () => act({ step: i + 1 }) }, word)));
}

const SUBSCRIPTS = "₁₂₃₄";
const SMALL = "⁰¹²³⁴";
const monomial = (indices) => (indices.length ? indices.map((i) => `k${SUBSCRIPTS[i]}`).join("") : "1");

function drawOrders(settings, spec, recurrent, t) {
  const steps = recurrent.heads[0].rows;
  const [step, before] = [steps[t], steps[t - 1]];
  const largest = largestOf([...steps.at(-1).state.values()].flat(2).map(Math.abs).concat([...step.state.values()].flat(2).map(Math.abs))) || 1;
  byId("orders").replaceChildren(...[...step.state].map(([n, rows]) => {
    const multisets = multisetsOf(settings.size, n);
    const place = h("div", { class: "order" });
    const columns = [...Array.from({ length: VALUE_SIZE }, (_, c) => `v${SUBSCRIPTS[c]}`), ...(spec.needsRowSum ? ["1"] : [])];
    const [label, wide, high, gap] = [Math.max(20, n * 14 + 10), 30, rows.length > 10 ? 12 : 24, 34];
    const width = label + 2 * columns.length * wide + gap + 6;
    const height = 20 + rows.length * high + 6;
    const node = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `State of order ${n}: ${rows.length} rows, and what this token wrote` });
    columns.forEach((name, c) => {
      node.append(s("text", { x: label + (c + 0.5) * wide, y: 13, class: "tick", "text-anchor": "middle" }, name));
      node.append(s("text", { x: label + gap + (columns.length + c + 0.5) * wide, y: 13, class: "tick", "text-anchor": "middle" }, name));
    });
    const here = largestOf(rows.flat().map(Math.abs)) || largest;
    rows.forEach((row, i) => {
      const y = 20 + i * high;
      node.append(s("text", { x: label - 6, y: y + high * 0.75, class: high < 14 ? "tick tiny" : "tick", "text-anchor": "end" }, monomial(multisets[i])));
      row.slice(0, columns.length).forEach((value, c) => {
        const written = step.written?.get(n)[i][c] ?? 0;
        const was = before?.state.get(n)[i][c] ?? 0;
        node.append(cell(label + c * wide, y, wide - 1, high - 1, value, here, `state ${monomial(multisets[i])} × ${columns[c]}: ${shown(was)} → ${shown(value)}`));
        node.append(cell(label + gap + (columns.length + c) * wide, y, wide - 1, high - 1, written, here, `written ${monomial(multisets[i])} × ${columns[c]}: ${shown(written)}`));
      });
    });
    node.append(s("text", { x: label + columns.length * wide + gap / 2, y: 20 + (rows.length * high) / 2 + 5, class: "plus", "text-anchor": "middle" }, "⇠"));
    const read = step.parts.get(n);
    place.append(
      h("h4", {}, `Order ${n}`, h("span", {}, ` S⁽${SMALL[n]}⁾ · ${rows.length} ${rows.length === 1 ? "row" : "rows"}`)),
      h("p", { class: "heads" }, h("span", {}, "state"), h("span", {}, "written now")), node,
      h("p", { class: "read" }, "reads ", h("b", {}, `(${read.slice(0, -1).map((x) => shown(x, 2)).join(", ")})`), spec.needsRowSum ? ` and ${shown(read.at(-1), 2)} for the row sum` : ""));
    return place;
  }));
  const total = step.rowSum;
  byId("reading").textContent =
    `All orders together: (${step.numerator.map((x) => shown(x, 3)).join(", ")})` +
    (spec.denominator ? ` over the row sum ${shown(total, 3)}` : ", scaled to length 1") +
    ` gives y = (${recurrent.y[0][t].map((x) => shown(x, 4)).join(", ")}).`;
}

const HOW = {
  parallel: "Parallel: every pair of tokens gets a weight, all at once. Time grows with the square of the text.",
  chunked: "Chunked: pairs within a chunk get a weight, everything before it is read from the state. Linear in the text.",
  recurrent: "Recurrent: no pair gets a weight. Each token writes into the state, then reads it. Constant memory.",
};

function drawMatrix(settings, spec, parallel, words, t) {
  const place = byId("matrix");
  const count = words.length;
  const side = Math.min(Math.max(place.clientWidth, 200), 300);
  const { node } = drawing(place, side, `Which pairs of tokens get a weight in the ${settings.form} form`);
  node.setAttribute("viewBox", `0 0 ${side} ${side}`);
  node.setAttribute("width", side);
  const step = side / count;
  const rows = parallel.heads[0].rows;
  for (let i = 0; i < count; i++) {
    const largest = largestOf(rows[i].weights.map(Math.abs)) || 1;
    for (let j = 0; j <= i; j++) {
      const chunk = settings.chunk;
      const isWeighed = settings.form === "parallel" || (settings.form === "chunked" && Math.floor(i / chunk) === Math.floor(j / chunk));
      const [x, y] = [j * step, i * step];
      if (isWeighed) node.append(cell(x, y, step - 1, step - 1, rows[i].weights[j], largest, `${words[i]} → ${words[j]}: ${shown(rows[i].weights[j])}`));
      else node.append(s("rect", { x, y, width: step - 1, height: step - 1, rx: 1.5, class: i === t ? "through now" : "through" }, s("title", {}, `${words[i]} → ${words[j]}: through the state`)));
    }
  }
  node.append(s("rect", { x: 0.75, y: t * step + 0.25, width: (t + 1) * step - 1.5, height: step - 1.5, class: "frame-now", rx: 2 }));
  placed(place, node);
  byId("how").textContent = HOW[settings.form];
}

function drawAgreement(settings, forms, t) {
  const difference = (form) => largestOf(forms[form].y[0].flatMap((row, i) => row.map((x, c) => Math.abs(x - forms.parallel.y[0][i][c]))));
  byId("agreement").replaceChildren(...Object.keys(forms).map((form) =>
    h("tr", { class: form === settings.form ? "chosen" : "" },
      h("th", { scope: "row" }, form), h("td", {}, forms[form].y[0][t].map((x) => x.toFixed(15).replace("-", "−")).join(", ")),
      h("td", { "data-difference": form }, form === "parallel" ? "–" : shown(difference(form), 2)))));
}

function drawMemory(settings, spec, count, t) {
  const place = byId("memory");
  const perKey = (settings.size + VALUE_SIZE) * 4;
  const state = Number(spec.stateSize(settings.size, VALUE_SIZE)) * 4;
  const { node, width, height } = drawing(place, 190, "Bytes of the state and of a key–value cache against the number of tokens");
  const [left, right, top, bottom] = [56, 8, 12, 24];
  const tokens = Math.max(16, count);
  const most = Math.max(state, perKey * tokens) * 1.1;
  const x = linear([0, tokens], [left, width - right]);
  const y = linear([0, most], [height - bottom, top]);
  for (const value of niceTicks(0, most, 6))
    node.append(s("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: value ? "grid" : "axis" }),
      s("text", { x: left - 6, y: y(value) + 4, class: "tick", "text-anchor": "end" }, value));
  for (let i = 0; i < t + 1; i++)
    node.append(s("rect", { x: x(i) + 1, width: Math.max(x(1) - x(0) - 2, 1), y: y(perKey * (i + 1)), height: y(0) - y(perKey * (i + 1)), class: "bar cache", rx: 1.5 }, s("title", {}, `cache after ${i + 1} tokens: ${perKey * (i + 1)} bytes`)));
  node.append(s("line", { x1: left, x2: width - right, y1: y(state), y2: y(state), class: "state-line" }, s("title", {}, `state: ${state} bytes`)));
  for (let i = 4; i <= tokens; i += 4) node.append(s("text", { x: x(i), y: height - 8, class: "tick", "text-anchor": "middle" }, i));
  placed(place, node);
  const real = spec.stateSize(64, 64) * 4n;
  byId("memory-says").textContent =
    `Now: state ${state} bytes, cache ${perKey * (t + 1)} bytes (fp32). A real head with d = 64 would hold ${bytes(real)} at this order, ` +
    `as much as ${Math.floor(Number(real) / 256).toLocaleString("en")} exact keys and values in bf16.`;
}
