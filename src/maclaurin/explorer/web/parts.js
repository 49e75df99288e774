// Panel 3: the parts of a spec as switches and as a notation, what each does to the output, and what cancels.

import { attend, largestOf } from "./maths.js";
import { NotationError, PARTS, Spec, SpecError, parse, print, resolve } from "./notation.js";
import { byId, bytes, drawing, h, linear, niceTicks, placed, s, shown } from "./draw.js";
import { wordVectors } from "./network.js";
import { wordsOf } from "./settings.js";

const [KEY_SIZE, OUTPUT_SIZE] = [4, 6];
const HEAD_SIZES = [16, 32, 64, 128];

/** The inputs of the panel: vectors of the words, and gates from the sliders. */
function inputsOf(settings) {
  const words = wordsOf(settings.sentence);
  const inputs = wordVectors(words, KEY_SIZE, OUTPUT_SIZE, settings.seed);
  inputs.gates = {
    input_gate: [words.map((_, i) => (i === 1 ? settings.in : 1))],
    log_forget: [words.map(() => Math.log(Math.max(settings.forget, 1e-80)))],
    output_gate: [words.map(() => settings.out)],
    denominator_gate: [words.map((_, i) => 0.2 * i - 0.5)],
  };
  return { words, inputs };
}

const lastRow = (spec, inputs) => attend(spec, inputs).y[0].at(-1);

/** The last output that was shown, for comparison with the next. */
let earlier = null;
let shownNow = null;
/** The last valid notation: it stays while the text in the box is invalid. */
let lastGood = null;

export function drawParts(settings, catalogue, act) {
  const box = byId("notation");
  if (box.value !== settings.spec && document.activeElement !== box) box.value = settings.spec;
  let spec;
  try {
    spec = resolve(settings.spec, catalogue);
    box.removeAttribute("aria-invalid");
    byId("notation-problem").replaceChildren();
  } catch (problem) {
    if (!(problem instanceof NotationError)) throw problem;
    drawProblem(settings.spec, problem);
    spec = lastGood ?? parse("exp/sum");
  }
  lastGood = spec;
  const { words, inputs } = inputsOf(settings);
  const y = lastRow(spec, inputs);
  if (shownNow !== null && shownNow.key !== spec.notation) earlier = shownNow;
  shownNow = { key: spec.notation, y };
  drawSwitches(spec, settings);
  drawOutput(spec, y, words);
  drawChanges(spec, inputs, y);
  drawMeaning(spec, catalogue, act);
}

/** The error, with the typed text and a mark under the place. */
function drawProblem(text, problem) {
  byId("notation").setAttribute("aria-invalid", "true");
  byId("notation-problem").replaceChildren(
    h("pre", { class: "caret" }, `${text}\n${" ".repeat(problem.position)}^`),
    ...problem.reason.split("\n").map((line) => h("p", {}, line)),
    h("p", { class: "quiet" }, `The panel below still shows ${lastGood?.notation ?? "exp/sum"}.`));
}

// ---------------------------------------------------------------------------------------------------- switches

const KERNELS = {
  exp: () => "exp", taylor: (n) => `taylor(${n})`, mean: (n) => `taylor(${n},about=mean)`, hermite: (n) => `hermite(${n})`,
  power: (n) => `power(${n})`, identity: () => "linear(identity)", elu1: () => "linear(elu1)", relu: () => "linear(relu)",
  cosine: () => "linear(cosine)", sigmoid: () => "sigmoid(-2)",
};

function drawSwitches(spec, settings) {
  const kernel = spec.kernel;
  const name = kernel.name === "taylor" && kernel.about === "mean" ? "mean" : kernel.name === "linear" ? kernel.feature : kernel.name;
  if (Object.hasOwn(KERNELS, name)) byId("part-kernel").value = name;
  const order = kernel.order ?? kernel.exponent;
  byId("part-order").disabled = order === undefined;
  if (order !== undefined && document.activeElement !== byId("part-order")) byId("part-order").value = order;
  setRadio("part-denominator", spec.denominator?.name ?? "none");
  setRadio("part-norm", spec.norm?.name ?? "none");
  byId("part-in").checked = spec.valueGates.length > 0;
  byId("part-forget").checked = spec.decayGates.length > 0;
  byId("part-out").checked = spec.gatesBeforeNorm.length > 0;
  byId("part-after").checked = spec.gatesAfterNorm.length > 0;
  byId("part-after").disabled = spec.norm === null && !spec.gatesAfterNorm.length;
  byId("part-window").checked = spec.window !== null;
  for (const field of ["size", "sinks", "kept"]) {
    const input = byId(`part-${field}`);
    input.disabled = spec.window === null;
    if (spec.window && document.activeElement !== input) input.value = spec.window[field];
  }
  for (const gate of ["in", "forget", "out"]) {
    byId(`gate-${gate}`).value = settings[gate];
    byId(`gate-${gate}-says`).textContent = settings[gate].toFixed(2);
  }
  byId("gate-in").disabled = !spec.valueGates.length;
  byId("gate-forget").disabled = !spec.decayGates.length;
  byId("gate-out").disabled = !spec.gatesBeforeNorm.length && !spec.gatesAfterNorm.length;
  byId("in-word").textContent = wordsOf(settings.sentence)[1] ?? "";
}

function setRadio(name, value) {
  for (const input of document.querySelectorAll(`input[name="${name}"]`)) input.checked = input.value === value;
}

const radio = (name) => document.querySelector(`input[name="${name}"]:checked`)?.value ?? "none";

/** The notation that the switches describe; it may be invalid. */
export function notationOfSwitches() {
  const order = byId("part-order").value.trim() || "2";
  const [divisor, norm] = [radio("part-denominator"), radio("part-norm")];
  const some = (name) => {
    const number = byId(`part-${name}`).value.trim();
    return number && number !== "0" ? `,${name}=${number}` : "";
  };
  const window = `+window(${byId("part-size").value.trim() || "3"}${some("sinks")}${some("kept")})`;
  return [
    KERNELS[byId("part-kernel").value](order),
    byId("part-window").checked ? window : "",
    byId("part-in").checked ? "*in" : "", byId("part-forget").checked ? "*forget" : "",
    divisor === "none" ? "" : `/${divisor}`, byId("part-out").checked ? "*out" : "",
    norm === "none" ? "" : `/${norm}`, byId("part-after").checked && norm !== "none" ? "*out" : "",
  ].join("");
}

// ------------------------------------------------------------------------------------------------------ figures

function drawOutput(spec, y, words) {
  const place = byId("output");
  const { node, width, height } = drawing(place, 210, "The output vector of the last word, and the one before the last change");
  const [left, right, top, bottom] = [44, 8, 12, 24];
  const before = earlier?.y ?? y;
  const most = Math.max(...y.map(Math.abs), ...before.map(Math.abs), 1e-12) * 1.1;
  const scale = linear([-most, most], [height - bottom, top]);
  const step = (width - left - right) / y.length;
  for (const tick of niceTicks(-most, most, 5))
    node.append(s("line", { x1: left, x2: width - right, y1: scale(tick), y2: scale(tick), class: tick === 0 ? "axis" : "grid" }),
      s("text", { x: left - 6, y: scale(tick) + 4, class: "tick", "text-anchor": "end" }, shown(tick, 2)));
  y.forEach((value, i) => {
    const x = left + i * step;
    node.append(s("rect", { x: x + step * 0.18, width: step * 0.64, y: Math.min(scale(value), scale(0)), height: Math.max(Math.abs(scale(value) - scale(0)), 0.5), class: `bar ${value < 0 ? "below" : "above"}`, rx: 2 }, s("title", {}, `y${i + 1} = ${shown(value, 6)}`)));
    node.append(s("line", { x1: x + step * 0.08, x2: x + step * 0.92, y1: scale(before[i]), y2: scale(before[i]), class: "exact" }, s("title", {}, `before: ${shown(before[i], 6)}`)));
    node.append(s("text", { x: x + step / 2, y: height - 8, class: "tick", "text-anchor": "middle" }, `y${i + 1}`));
  });
  placed(place, node);
  const length = Math.sqrt(y.reduce((total, x) => total + x * x, 0));
  const moved = largestOf(y.map((x, i) => Math.abs(x - before[i])));
  byId("output-says").textContent =
    `Output of “${words.at(-1)}”: length ${shown(length, 4)}. ` +
    (earlier ? `Black lines: ${earlier.key}; the largest change is ${shown(moved, 2)}.` : "Switch a part to see what changes.");
}

/** What each part does: the output without it. */
function drawChanges(spec, inputs, y) {
  const cancelled = spec.cancelledParts;
  const rows = spec.parts.slice(1).map((part) => {
    const name = PARTS[part.name].mark + print(part);
    try {
      const without = new Spec(spec.parts.filter((p) => p !== part));
      const change = largestOf(lastRow(without, inputs).map((x, i) => Math.abs(x - y[i])));
      const isNothing = cancelled.includes(part);
      return h("tr", { class: isNothing ? "nothing" : "" }, h("th", { scope: "row" }, h("code", {}, name)),
        h("td", { "data-change": name }, shown(change, 2)), h("td", {}, isNothing ? "does nothing: the norm divides it out" : "changes the output"));
    } catch (problem) {
      if (!(problem instanceof SpecError)) throw problem;
      return h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td", {}, "–"), h("td", {}, `cannot be left out: ${problem.message.split("\n")[0]}`));
    }
  });
  byId("changes").replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td", { colspan: 3 }, "There is only a kernel."))]));
  const simpler = spec.simplified();
  const place = byId("simpler");
  place.hidden = simpler.notation === spec.notation;
  if (place.hidden) return;
  const off = largestOf(lastRow(simpler, inputs).map((x, i) => Math.abs(x - y[i])));
  place.replaceChildren("Equal and simpler: ", h("code", {}, simpler.notation), `. Largest difference here: ${shown(off, 2)}.`);
}

// ------------------------------------------------------------------------------------------------------ meaning

/** x_ts, S_t⁽ⁿ⁾ and e^x with real subscripts and superscripts. */
export function typesetText(text) {
  const nodes = [];
  const pattern = /_([A-Za-z]+(?:[≤<][A-Za-z]+)*₋?₁?)|\^(⊗?n|[A-Za-z0-9.−-]+|\([^)]*\))/gu;
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    nodes.push(text.slice(at, match.index));
    nodes.push(match[1] === undefined ? h("sup", {}, match[2]) : h("sub", {}, match[1]));
    at = match.index + match[0].length;
  }
  return [...nodes, text.slice(at)];
}

const lines = (text) => text.split("\n").map((line) => h("div", {}, ...typesetText(line)));

function drawMeaning(spec, catalogue, act) {
  byId("spec-name").textContent = spec.notation;
  byId("formula").replaceChildren(...lines(spec.formula));
  byId("recurrence").replaceChildren(...lines(spec.recurrence));
  const known = catalogue.filter((entry) => parse(entry.notation).notation === spec.notation);
  byId("known").textContent = known.length
    ? `In the catalogue: ${known.map((entry) => `${entry.name} (${entry.source})`).join("; ")}.`
    : "Not in the catalogue: your own variant.";
  byId("needs").textContent = spec.gates.length ? `Takes ${spec.gates.join(", ")} beside q, k and v.` : "Takes only q, k and v.";
  const place = byId("state-sizes");
  if (!spec.hasFiniteState) {
    const why = spec.hasSeries ? "As its series, cut at an order certified from the scores, the state is finite." : "";
    place.replaceChildren(h("tr", {}, h("td", { colspan: 4 }, `No state of fixed size: it keeps every key and value. ${why}`)));
    return;
  }
  const count = (number) => (number < 10n ** 12n ? number.toLocaleString("en") : shown(Number(number), 3));
  place.replaceChildren(...HEAD_SIZES.map((d) => h("tr", {},
    h("td", {}, d), h("td", {}, count(spec.features(d))), h("td", {}, count(spec.stateSize(d, d))), h("td", {}, bytes(spec.stateSize(d, d) * 4n)))));
}
