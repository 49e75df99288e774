// The picture at the top: one row of softmax as the sum of its orders, each as a small chart.

import { softmax, termsOfRow } from "./maths.js";
import { byId, h, s } from "./draw.js";

const LAST_KEY = 11;
const MEANINGS = ["all keys equal", "linear attention", "pairs of features", "triples", "fours"];

/** The first tokens of the head that looks at everything: its terms have sizes that can be drawn. */
export function drawSum(capture) {
  const x = capture.heads[0].scores[LAST_KEY];
  const terms = termsOfRow(x, MEANINGS.length);
  const whole = softmax(x);
  const most = Math.max(...whole, ...terms.flat().map(Math.abs));
  const charts = terms.flatMap((weights, n) => [
    ...(n ? [h("span", { class: "sign" }, "+")] : []),
    chart(weights, most, `order ${n}`, MEANINGS[n]),
  ]);
  byId("sum").replaceChildren(
    ...charts, h("span", { class: "sign" }, "+ … ="), chart(whole, most, "softmax", "every order"));
  byId("sum-says").textContent =
    `“${capture.tokens.slice(0, LAST_KEY + 1).join("").trim()}”: the weights of its last token, order by order about the mean, in a ` +
    `head of ${capture.model}.`;
}

function chart(weights, most, name, meaning) {
  const [width, height] = [104, 74];
  const step = width / weights.length;
  const zero = height * 0.68;
  const unit = (zero - 4) / most;
  const bars = weights.map((w, i) => s("rect", {
    x: (i * step + 0.8).toFixed(1), width: (step - 1.6).toFixed(1), rx: 1,
    y: Math.min(zero, zero - w * unit).toFixed(1), height: Math.max(Math.abs(w * unit), 0.8).toFixed(1), class: w < 0 ? "below" : "above",
  }));
  const node = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Weights of ${name}` },
    s("line", { x1: 0, x2: width, y1: zero, y2: zero, class: "grid" }), ...bars);
  return h("div", { class: "summand" }, node, h("b", {}, name), h("span", {}, meaning));
}
