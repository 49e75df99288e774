// Small helpers for HTML and SVG: elements, scales, number texts, and a figure saved as a file.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element. */
export const h = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
/** An SVG element. */
export const s = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

/** A linear scale from a domain to a range. */
export const linear = ([a, b], [from, to]) => (x) => from + ((x - a) / (b - a || 1)) * (to - from);
export const clamped = (x, least, most) => Math.min(Math.max(x, least), most);

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const raised = (n) => (n < 0 ? "⁻" : "") + [...String(Math.abs(n))].map((digit) => SUPERSCRIPTS[digit]).join("");

/** A number as text: 0.123, 4.5·10⁻⁷, 0. */
export function shown(x, digits = 3) {
  if (x === Infinity) return "∞";
  if (!Number.isFinite(x)) return "not a number";
  if (x === 0) return "0";
  const exponent = Math.floor(Math.log10(Math.abs(x)));
  if (exponent >= -3 && exponent < 5)
    return String(Number(x.toPrecision(digits))).replace("-", "−");
  const [mantissa, power] = x.toExponential(Math.max(digits - 2, 0)).split("e");
  return `${mantissa.replace("-", "−")}·10${raised(Number(power))}`;
}

/** 10ⁿ. */
export const powerOfTen = (n) => (n === 0 ? "1" : `10${raised(n)}`);

/** A share as a percentage: 12 %, 0.3 %, over 1000 %. */
export function percent(x) {
  if (!Number.isFinite(x)) return "not a number";
  if (x > 10) return "more than 1,000 %";
  if (x !== 0 && x < 1e-4) return `${shown(x * 100, 2)} %`;
  return `${Number((x * 100).toPrecision(2))} %`;
}

export function bytes(count) {
  const number = Number(count);
  for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (number >= limit) return number / limit >= 1e4 ? `${shown(number / limit, 3)} ${unit}` : `${Number((number / limit).toPrecision(3)).toLocaleString("en")} ${unit}`;
  return `${number} bytes`;
}

/** Round numbers from least to most, about as many as wanted. */
export function niceTicks(least, most, wanted) {
  const rough = (most - least) / wanted;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const size = unit * ([1, 2, 5].find((factor) => unit * factor >= rough) ?? 10);
  const found = [];
  for (let n = Math.ceil(least / size); n * size <= most; n++) found.push(Number((n * size).toPrecision(6)));
  return found;
}

/** An empty drawing as wide as its container; screen readers read its title. */
export function drawing(place, height, title) {
  const width = Math.max(place.clientWidth, 260);
  const node = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title });
  return { node, width, height };
}

/** Put a drawing into its container, which is emptied first. */
export const placed = (place, node) => place.replaceChildren(node);

const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "font-size", "font-family", "font-weight", "text-anchor", "opacity"];

/** The drawing as the text of an SVG file, with colours and fonts written into it. */
export function svgText(node) {
  const copy = node.cloneNode(true);
  const [own, copies] = [[node, ...node.querySelectorAll("*")], [copy, ...copy.querySelectorAll("*")]];
  own.forEach((original, i) => {
    const style = getComputedStyle(original);
    copies[i].setAttribute("style", STYLES.map((name) => `${name}:${style.getPropertyValue(name)}`).join(";"));
    copies[i].removeAttribute("class");
  });
  const ground = s("rect", { width: "100%", height: "100%", fill: getComputedStyle(document.body).backgroundColor });
  copy.prepend(ground);
  copy.setAttribute("xmlns", SVG);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(copy)}\n`;
}

export function saveFile(name, text, type) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

/** A cell of a heat-map: blue above zero, orange below, as strong as its share of the largest. */
export function cell(x, y, width, height, value, largest, title) {
  const strength = largest > 0 && Number.isFinite(value) ? clamped(Math.abs(value) / largest, 0, 1) : 0;
  return s("rect", {
    x, y, width, height, rx: 1.5, class: value < 0 ? "below" : "above", "fill-opacity": (0.04 + 0.96 * strength ** 0.75).toFixed(3),
  }, s("title", {}, title));
}
