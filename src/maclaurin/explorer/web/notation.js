// The algebra of the library in JavaScript: notation ⇄ spec, what may stand together, formula, recurrence,
// state size, what cancels. Held to maclaurin.spec by tests/golden/notation.json: same answers, same errors.

export const HIGHEST_ORDER = 170;
export const ORDER_OF_PARTS =
  "a spec reads: kernel + window * in * forget / denominator * out / norm * out; everything except the kernel is optional";

/** Parts that cannot be built or mean nothing together; `place` is a part, or the text of an argument. */
export class SpecError extends Error {
  constructor(reason, place = null) {
    super(reason);
    this.place = place;
  }
}

/** A text that is not the notation of a spec: what is wrong, and where it stands. */
export class NotationError extends SpecError {
  constructor(text, position, reason) {
    super(reason);
    Object.assign(this, { text, position, reason });
  }
}

// ------------------------------------------------------------------------------------ how values are written

/** A number as Python writes it: 5 for 5.0, 1e-08, 0.0001. */
export function written(value) {
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e16) return String(value);
  const [digits, power] = value.toExponential().split("e");
  const exponent = Number(power);
  if (exponent >= -4 && exponent < 16) return String(value);
  return `${digits}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
}

/** A text in quotes, as Python's repr. */
function quoted(text) {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  return quote + text.replaceAll("\\", "\\\\").replaceAll(quote === "'" ? "'" : "\0", "\\'") + quote;
}

/** " Did you mean …?" for a word close to known ones, by the ratio of Python's difflib. */
export function didYouMean(word, known) {
  const close = known
    .map((name) => [similarity(name, word), name])
    .filter(([ratio]) => ratio >= 0.5)
    .sort((a, b) => b[0] - a[0] || (a[1] < b[1] ? 1 : -1))
    .slice(0, 3)
    .map(([, name]) => name);
  return close.length ? ` Did you mean ${close.join(" or ")}?` : "";
}

function similarity(a, b) {
  return a.length + b.length ? (2 * matching(a, b)) / (a.length + b.length) : 1;
}

/** Letters in common: the longest common piece, and the same to its left and to its right. */
function matching(a, b) {
  let [size, i, j] = [0, 0, 0];
  for (let m = 0; m < a.length; m++)
    for (let n = 0; n < b.length; n++) {
      let k = 0;
      while (m + k < a.length && n + k < b.length && a[m + k] === b[n + k]) k++;
      if (k > size) [size, i, j] = [k, m, n];
    }
  if (size === 0) return 0;
  return size + matching(a.slice(0, i), b.slice(0, j)) + matching(a.slice(i + size), b.slice(j + size));
}

// --------------------------------------------------------------------------------------------------- fields

class BadValue extends Error {}

function finite(text) {
  const value = /^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$/.test(text) ? Number(text) : NaN;
  if (!Number.isFinite(value)) throw new BadValue();
  return value;
}

function accepted(value, isRight) {
  if (!isRight) throw new BadValue();
  return value;
}

function wholeNumber(name, { atLeast = 0, atMost = Infinity, initial } = {}) {
  const read = (text) => {
    const value = /^[-+]?\d+$/.test(text) ? Number(text) : NaN;
    return accepted(value, value >= atLeast && value <= atMost);
  };
  const limit = atMost === Infinity ? "" : ` and ≤ ${atMost}`;
  return { name, read, expects: `a whole number ≥ ${atLeast}${limit}`, initial };
}

const anyNumber = (name, initial) => ({ name, read: finite, expects: "a number", initial });
const flag = (name) => ({ name, flag: true, expects: "no value", initial: false, read: () => accepted(true, false) });
const positiveNumber = (name, initial) => ({
  name, initial, expects: "a positive number",
  read: (text) => { const value = finite(text); return accepted(value, value > 0); },
});
const oneOf = (name, ...words) => ({
  name, initial: words[0], expects: words.join(" or "), read: (text) => accepted(text, words.includes(text)),
});

/** A feature map by name; those of the library take no arguments. */
function readFeature(text) {
  const { name, positional, named } = splitArguments(text);
  const known = Object.keys(FEATURES);
  if (!known.includes(name))
    throw new SpecError(
      `there is no feature map ${quoted(name)}; choose from ${[...known].sort().join(", ")}.` + didYouMean(name, known), name);
  if (positional.length) throw new SpecError(`${name} does not take ${quoted(positional[0])}; it is written ${name}.`, positional[0]);
  for (const option of named.keys())
    throw new SpecError(`${name} has no option ${quoted(option)}; it is written ${name}.`, option);
  return name;
}

/** name(a, b=c) as its name, its arguments without a name, and those with one. */
function splitArguments(text) {
  const open = text.indexOf("(");
  const [positional, named] = [[], new Map()];
  if (open < 0) return { name: text.trim(), positional, named };
  const inside = text.slice(open + 1).trimEnd().replace(/\)$/, "").trim();
  for (const argument of inside ? inside.split(",") : []) {
    const equals = argument.indexOf("=");
    if (equals < 0) positional.push(argument.trim());
    else named.set(argument.slice(0, equals).trim(), argument.slice(equals + 1).trim());
  }
  return { name: text.slice(0, open).trim(), positional, named };
}

// ------------------------------------------------------------------------------------------------- the parts

const root = (product) => `${product}/√d`;

/** Feature maps φ: what is known of the sign of φ(q)·φ(k), and how they are written. */
export const FEATURES = {
  identity: { sign: "indefinite", text: (u) => u, score: root },
  elu1: { sign: "positive", text: (u) => `(elu(${u})+1)`, score: (p) => p },
  relu: { sign: "nonnegative", text: (u) => `relu(${u})`, score: root },
  cosine: { sign: "indefinite", text: (u) => `${u}/‖${u}‖`, score: (p) => p },
};

/** 1, 1, 1/2!, …, 1/N!, each from the whole number n!, as Python computes it. */
const inverseFactorials = (order) => {
  let factorial = 1n;
  return upTo(order).map((n) => 1 / Number((factorial *= BigInt(n || 1))));
};
const upTo = (order) => Array.from({ length: order + 1 }, (_, n) => n);
const nonzero = (series) => series.flatMap((a, n) => (a !== 0 ? [n] : []));
const neighbours = (n) => [n - 1, n + 1].filter((m) => m > 0);

/** What every kernel says of itself; the table below says where one differs. */
const KERNEL = {
  family: "kernel", mark: "", stage: 0, fields: [],
  orders: () => null, // the powers that the state holds; null without a finite state
  sign: () => "positive",
  rowSumSign(p) { return this.sign(p); },
  dependsOnRow: () => false, countsKeys: () => false, isExp: false, expandsExp: false, hasSeries: () => false,
  reference: () => "0", where: () => [], neighbours: () => [], feature: () => null, scoreText: (p, product) => root(product),
  simplified: (p) => p, check() {},
};

/** Denominators, gates, norms and windows have their own words; names are unique among all parts. */
export const PARTS = {
  exp: {
    ...KERNEL, fields: [anyNumber("clamp", null)], isExp: true, hasSeries: (p) => p.clamp === null,
    text: (p, x) => (p.clamp === null ? `exp(${x})` : `exp(min(${x}, ${written(p.clamp)}))`),
  },
  taylor: {
    ...KERNEL, fields: [wholeNumber("order", { atMost: HIGHEST_ORDER }), oneOf("about", "zero", "mean")],
    expandsExp: true,
    series: (p) => inverseFactorials(p.order),
    orders: (p) => upTo(p.about === "mean" ? Math.max(p.order, 1) : p.order),
    sign: (p) => (p.order % 2 === 0 ? "positive" : "indefinite"),
    rowSumSign(p) { return p.order === 1 && p.about === "mean" ? "positive" : this.sign(p); },
    dependsOnRow: (p) => p.about === "mean",
    countsKeys: (p) => p.order === 0,
    reference: (p) => (p.about === "mean" ? "x̄" : "0"),
    neighbours: (p) => neighbours(p.order).map((n) => make("taylor", { order: n, about: p.about })),
    text: (p, x) => (p.about === "mean" ? `T${p.order}(${x} − x̄)` : `T${p.order}(${x})`),
    where: (p) => [`T${p.order}(x) = Σ_n≤${p.order} x^n/n!`],
    simplified: (p) => {
      if (p.about !== "mean" || p.order > 1) return p;
      return p.order === 0 ? make("taylor", { order: 0 }) : make("hermite", { order: 1 });
    },
    check(p, spec) {
      if (p.about !== "mean" || spec.ignoresRowScale) return;
      const name = print(p);
      if (spec.denominator?.name === "sum")
        throw new SpecError(
          `${name} drops the factor e^x̄ of its row, but /${print(spec.denominator)} depends on it.\n` +
            `Use a plain row sum: ${name}/sum.`, spec.denominator);
      throw new SpecError(
        `${name} drops the factor e^x̄ of its row, so it needs a row sum or a norm per head, which cancel it.\n` +
          `Use ${name}/sum or ${name}/l2.`);
    },
  },
  hermite: {
    ...KERNEL, fields: [wholeNumber("order", { atMost: HIGHEST_ORDER })], expandsExp: true,
    orders: (p) => upTo(p.order),
    sign: (p) => (p.order === 0 ? "positive" : "indefinite"),
    rowSumSign: () => "positive",
    countsKeys: () => true,
    dependsOnRow: (p) => p.order > 0,
    reference: (p) => ["0", "x̄"][p.order] ?? "x̄ + u/2, u the variance of the scores over the tail",
    text: (p, x) => (p.order > 0 ? `H${p.order}(${x} − x̄)` : "1"),
    where: (p) =>
      p.order > 0
        ? [`H${p.order}(c) = 1 + Σ_1≤n≤${p.order} (h_n(c) − m_n)/n!, ` +
            "with the Hermite polynomials h for the variance of the scores and their means m"]
        : [],
    simplified: (p) => (p.order === 0 ? make("taylor", { order: 0 }) : p),
  },
  power: {
    ...KERNEL, fields: [wholeNumber("exponent", { atMost: HIGHEST_ORDER })],
    series: (p) => [...Array(p.exponent).fill(0), 1],
    orders: (p) => [p.exponent],
    sign: (p) => (p.exponent === 0 ? "positive" : p.exponent % 2 ? "indefinite" : "nonnegative"),
    countsKeys: (p) => p.exponent === 0,
    neighbours: (p) => neighbours(p.exponent).map((n) => make("power", { exponent: n })),
    text: (p, x) => `(${x})^${p.exponent}`,
    simplified: (p) => {
      if (p.exponent === 0) return make("taylor", { order: 0 });
      return p.exponent === 1 ? make("linear", { feature: "identity" }) : p;
    },
  },
  poly: {
    ...KERNEL, fields: [{ name: "series", read: finite, expects: "numbers", variadic: true }], expandsExp: true,
    series: (p) => p.series,
    orders: (p) => nonzero(p.series),
    sign: (p) => signOfPolynomial(p.series),
    text: (p, x) => textOfSeries(p.series, x),
    simplified: (p) => {
      const highest = Math.max(0, ...nonzero(p.series));
      if (highest > HIGHEST_ORDER) return p;
      const series = p.series.slice(0, highest + 1);
      for (const known of [make("taylor", { order: highest }), make("power", { exponent: highest })])
        if (same(series, seriesOf(known))) return PARTS[known.name].simplified(known);
      return same(series, p.series) ? p : make("poly", { series });
    },
  },
  linear: {
    ...KERNEL,
    fields: [
      { name: "feature", read: readFeature, expects: "a feature map" },
      anyNumber("clamp", null),
      {
        name: "scale", initial: null, expects: "a number other than 0",
        read: (text) => { const value = finite(text); return accepted(value, value !== 0); },
      },
    ],
    series: () => [0, 1],
    orders: (p) => (p.clamp === null ? [1] : null),
    sign: (p) => {
      const down = (p.scale !== null && p.scale < 0) || (p.clamp !== null && p.clamp <= 0);
      return down ? "indefinite" : FEATURES[p.feature].sign;
    },
    feature: (p) => p.feature,
    scoreText: (p, product) => {
      if (p.scale === null) return FEATURES[p.feature].score(product);
      return p.scale === 1 ? product : `${written(p.scale)} ${product}`;
    },
    text: (p, x) => (p.clamp === null ? x : `min(${x}, ${written(p.clamp)})`),
  },
  sigmoid: {
    ...KERNEL, fields: [anyNumber("bias")],
    text: (p, x) => `σ(${x} ${p.bias < 0 ? "−" : "+"} ${written(Math.abs(p.bias))})`,
  },

  window: {
    family: "window", mark: "+", stage: 1,
    fields: [wholeNumber("size", { atLeast: 1 }), wholeNumber("sinks", { initial: 0 }), wholeNumber("kept", { initial: 0 })],
    near: (p) => `the last ${p.size} keys` + (p.sinks ? ` and the first ${p.sinks}` : ""),
    text(p) { return this.near(p) + (p.kept ? ` and the ${p.kept} with the largest score a of those before` : ""); },
    slots: (p) => p.size + p.sinks + p.kept,
    check(p, spec) {
      const kernel = PARTS[spec.kernel.name];
      if (kernel.expandsExp) return;
      const [tail, name] = [print(spec.kernel), print(p)];
      throw new SpecError(
        kernel.isExp
          ? `${tail} is exact for every key, so a window added to it changes nothing.\n` +
            `Use taylor(2,about=mean)+${name}/sum, or poly(0)+${name}/sum for the window alone.`
          : `+${name} keeps keys at their exact weight e^x, and ${tail} does not approximate e^x, so the two ` +
            "cannot share a row.\nUse taylor(N), hermite(N) or poly(…) as the tail.", p);
    },
  },

  in: { family: "gate", mark: "*", stage: 2, fields: [], argument: "input_gate", symbol: "i_s", check() {} },
  forget: { family: "gate", mark: "*", stage: 3, fields: [], argument: "log_forget", symbol: "f_r", check() {} },
  out: { family: "gate", mark: "*", stage: 5, fields: [], argument: "output_gate", symbol: "o_t", check() {} },

  sum: {
    family: "denominator", mark: "/", stage: 4,
    fields: [positiveNumber("floor", null), positiveNumber("eps", null), flag("detach")],
    text: (p, rowSum) => {
      let body = p.eps === null ? rowSum : `${rowSum} + ${written(p.eps)}`;
      if (p.floor !== null) body = `max(${body}, ${written(p.floor)})`;
      return p.detach ? `detach(${body})` : p.floor !== null ? body : `(${body})`;
    },
    canVanish: (p, spec) => {
      if (p.floor !== null) return false;
      const sign = PARTS[spec.kernel.name].rowSumSign(spec.kernel);
      return sign === "indefinite" || (sign === "nonnegative" && spec.window === null && p.eps === null);
    },
    check(p, spec) {
      const kernel = PARTS[spec.kernel.name];
      if (kernel.rowSumSign(spec.kernel) !== "indefinite" || p.floor !== null) return;
      const [name, even] = [print(spec.kernel), kernel.neighbours(spec.kernel).map((k) => `${print(k)}/${print(p)}`)];
      const hints = [...(even.length ? [`an even order (${even.join(", ")})`] : []), `a norm: ${name}/l2`];
      throw new SpecError(
        `${name}/${print(p)} divides by a row sum that can be negative, so it can vanish.\n` +
          `Use ${hints.join(" or ")}.`, p);
    },
  },
  len: { family: "denominator", mark: "/", stage: 4, fields: [], text: () => "t", canVanish: () => false, check() {} },
  running: {
    family: "denominator", mark: "/", stage: 4, argument: "denominator_gate",
    fields: [positiveNumber("floor", null), flag("len")],
    text: (p) => {
      const sum = "Σ_r≤t exp(g_r)";
      const body = p.floor === null ? `(${sum})` : `max(${sum}, ${written(p.floor)})`;
      return p.len ? `(t·${body})` : body;
    },
    canVanish: () => false, check() {},
  },

  l2: {
    family: "norm", mark: "/", stage: 6,
    fields: [{
      name: "scale", initial: 1, expects: "a positive number or dim",
      read: (text) => { const value = text === "dim" ? text : finite(text); return accepted(value, value === "dim" || value > 0); },
    }],
    text: (p) => (p.scale === 1 ? "L2" : `${p.scale === "dim" ? "e" : written(p.scale)}·L2`),
    perHead: () => true, check() {},
  },
  rms: {
    family: "norm", mark: "/", stage: 6, fields: [flag("heads")],
    text: (p) => (p.heads ? "RMS_heads" : "RMS"), perHead: (p) => !p.heads, check() {},
  },
  layer: { family: "norm", mark: "/", stage: 6, fields: [], text: () => "LayerNorm", perHead: () => true, check() {} },
};

const same = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);

/** A part by name, with the fields that are given and the others at their initial values. */
export function make(name, fields = {}) {
  const part = { name };
  for (const field of PARTS[name].fields) part[field.name] = fields[field.name] ?? field.initial;
  return part;
}

/** The part as it is written: taylor(2,about=mean). */
export function print(part) {
  const shown = [];
  for (const field of PARTS[part.name].fields) {
    const value = part[field.name];
    if (field.variadic) shown.push(...value.map(written));
    else if (field.flag) shown.push(...(value ? [field.name] : []));
    else if (field.initial === undefined) shown.push(written(value));
    else if (value !== field.initial) shown.push(`${field.name}=${written(value)}`);
  }
  return shown.length ? `${part.name}(${shown.join(",")})` : part.name;
}

/** How a part is written, for messages. */
export function usage(name) {
  const shown = PARTS[name].fields.map((f) =>
    f.variadic ? "a0, a1, …" : f.flag || f.initial === undefined ? f.name : `${f.name}=…`);
  return shown.length ? `${name}(${shown.join(", ")})` : name;
}

/** κ as a₀, a₁, …, where these are numbers. */
export const seriesOf = (kernel) => PARTS[kernel.name].series(kernel);

// --------------------------------------------------------------------------------------------------- reading

const TOKEN = /\s*(?:(?<word>[A-Za-z_][A-Za-z0-9_]*)|(?<number>[-+]?[0-9.][0-9.eE+-]*)|(?<mark>.))/uy;
const FAMILIES = { "+": ["window"], "*": ["gate"], "/": ["denominator", "norm"] };

/** The spec that a text is the notation of; a NotationError says what is wrong and where. */
export function parse(text) {
  const reader = new Reader(text);
  const parts = [reader.part("kernel")];
  const places = [0];
  while (!reader.atEnd) {
    places.push(reader.position);
    parts.push(reader.part(...FAMILIES[reader.mark(Object.keys(FAMILIES))]));
    checked(text, parts, places, inFormulaOrder);
  }
  return checked(text, parts, places, (all) => new Spec(all));
}

/** A name of the catalogue or a notation, as a spec. */
export function resolve(text, catalogue) {
  const name = text.trim();
  const entry = catalogue.find((e) => e.name === name || e.aliases.includes(name));
  if (entry) return parse(entry.notation);
  try {
    return parse(text);
  } catch (problem) {
    if (!(problem instanceof NotationError) || /[(/*+]/.test(name)) throw problem;
    const near = didYouMean(name, catalogue.flatMap((e) => [e.name, ...e.aliases]));
    throw new NotationError(text, problem.position, `${problem.reason} It is not a name in the catalogue either.${near}`);
  }
}

function checked(text, parts, places, build) {
  try {
    return build(parts);
  } catch (problem) {
    if (!(problem instanceof SpecError)) throw problem;
    throw new NotationError(text, places[parts.indexOf(problem.place)] ?? 0, problem.message);
  }
}

/** A cursor over the text that knows where it is. */
class Reader {
  constructor(text) {
    this.text = text;
    this.position = 0;
    this.writtenAt = new Map();
  }

  error(position, reason) {
    return new NotationError(this.text, position, reason);
  }

  get atEnd() {
    return !this.text.slice(this.position).trim();
  }

  get following() {
    return this.text.slice(this.position).trimStart();
  }

  next() {
    TOKEN.lastIndex = this.position;
    const match = this.atEnd ? null : TOKEN.exec(this.text);
    if (match === null) return { at: this.text.length, kind: "end", word: "" };
    this.position = TOKEN.lastIndex;
    const kind = Object.keys(match.groups).find((k) => match.groups[k] !== undefined);
    return { at: this.position - match.groups[kind].length, kind, word: match.groups[kind] };
  }

  mark(allowed) {
    const { at, kind, word } = this.next();
    if (kind !== "mark" || !allowed.includes(word))
      throw this.error(at, `expected one of ${allowed.join(" ")} here, found ${quoted(word)}; ${ORDER_OF_PARTS}.`);
    return word;
  }

  part(...families) {
    const kinds = families.join(" or ");
    const { at, kind, word } = this.next();
    if (kind !== "word")
      throw this.error(at, `expected the name of a ${kinds} here, found ${word ? quoted(word) : "the end"}.`);
    const known = families.flatMap((f) => Object.keys(PARTS).filter((name) => PARTS[name].family === f));
    if (!known.includes(word) && Object.hasOwn(PARTS, word)) {
      const { family, mark } = PARTS[word];
      throw this.error(at, `${mark}${word} is a ${family}, and a ${kinds} is expected here; ${ORDER_OF_PARTS}.`);
    }
    if (!known.includes(word))
      throw this.error(
        at, `there is no ${kinds} ${quoted(word)}; choose from ${[...known].sort().join(", ")}.` + didYouMean(word, known));
    const { positional, named } = this.arguments();
    try {
      return fromArguments(word, positional, named);
    } catch (problem) {
      if (!(problem instanceof SpecError)) throw problem;
      throw this.error(this.writtenAt.get(problem.place) ?? at, problem.message);
    }
  }

  /** The arguments of an argument with their parentheses, unread; empty if it has none. */
  nested() {
    if (!this.following.startsWith("(")) return "";
    const opened = this.next().at;
    for (let depth = 1; depth; ) {
      const { at, kind, word } = this.next();
      if (kind === "end") throw this.error(opened, "this parenthesis is never closed.");
      if (!this.writtenAt.has(word)) this.writtenAt.set(word, at);
      depth += (word === "(") - (word === ")");
    }
    return this.text.slice(opened, this.position);
  }

  arguments() {
    const [positional, named] = [[], new Map()];
    this.writtenAt = new Map();
    if (!this.following.startsWith("(")) return { positional, named };
    const opened = this.next().at;
    const bad = ({ at, kind, word }) =>
      kind === "end"
        ? this.error(opened, "this parenthesis is never closed.")
        : this.error(at, `expected an argument, a comma or ) here, found ${quoted(word)}.`);
    for (;;) {
      const token = this.next();
      if (token.word === ")" && !positional.length && !named.size) return { positional, named };
      if (token.kind !== "word" && token.kind !== "number") throw bad(token);
      this.writtenAt.set(token.word, token.at);
      if (this.following.startsWith("=")) {
        this.next();
        const value = this.next();
        if (value.kind !== "word" && value.kind !== "number")
          throw this.error(value.at, `${token.word}= needs a value.`);
        if (named.has(token.word)) throw this.error(token.at, `${token.word} is given twice.`);
        named.set(token.word, value.word + (value.kind === "word" ? this.nested() : ""));
        this.writtenAt.set(value.word, value.at);
      } else if (named.size && token.kind === "number") {
        throw this.error(token.at, "a number without a name comes before the named arguments.");
      } else positional.push(token.word + (token.kind === "word" ? this.nested() : ""));
      const mark = this.next();
      if (mark.word === ")") return { positional, named };
      if (mark.word !== ",") throw bad(mark);
    }
  }
}

function fromArguments(name, positional, named) {
  const fields = PARTS[name].fields;
  const values = {};
  const variadic = fields.find((f) => f.variadic);
  if (variadic) values[variadic.name] = positional.map((text) => read(name, variadic, text));
  else bindPositional(name, fields, positional, values);
  for (const [option, text] of named) {
    const field = fields.find((f) => f.name === option);
    if (!field)
      throw new SpecError(
        `${name} has no option ${quoted(option)}; it is written ${usage(name)}.` +
          didYouMean(option, fields.map((f) => f.name)), option);
    if (Object.hasOwn(values, option)) throw new SpecError(`${name} got ${option} twice.`, option);
    values[option] = read(name, field, text);
  }
  const missing = fields.find((f) => !f.variadic && f.initial === undefined && !Object.hasOwn(values, f.name));
  if (missing) throw new SpecError(`${name} needs ${missing.name}: ${usage(name)}.`);
  if (variadic && !values[variadic.name].length)
    throw new SpecError("poly needs at least one coefficient: poly(1,1,0.5).");
  return make(name, values);
}

function bindPositional(name, fields, positional, values) {
  const inOrder = fields.filter((f) => !f.flag);
  for (const text of positional) {
    if (fields.some((f) => f.flag && f.name === text)) values[text] = true;
    else if (inOrder.length) {
      const field = inOrder.shift();
      values[field.name] = read(name, field, text);
    } else throw new SpecError(`${name} does not take ${quoted(text)}; it is written ${usage(name)}.`, text);
  }
}

function read(name, field, text) {
  try {
    return field.read(text);
  } catch (problem) {
    if (!(problem instanceof BadValue)) throw problem;
    const near = didYouMean(text, field.expects.split(" or "));
    throw new SpecError(`${name}: ${field.name} must be ${field.expects}, not ${quoted(text)}.${near}`, text);
  }
}

// -------------------------------------------------------------------------------------------------- the spec

const AFTER_NORM = 7;

function inFormulaOrder(parts) {
  const stages = [];
  parts.forEach((part, at) => {
    const { family, stage: own } = PARTS[part.name];
    if (family !== "gate" && parts.slice(0, at).some((p) => PARTS[p.name].family === family))
      throw new SpecError(`a spec has one ${family}, and this is a second.`, part);
    const stage = part.name === "out" && stages.includes(6) ? AFTER_NORM : own;
    const onKeys = (a, b) => (a === 2 && b === 3) || (a === 3 && b === 2);
    if (stages.some((before) => before > stage && !onKeys(before, stage)))
      throw new SpecError(`this ${family} is out of order; ${ORDER_OF_PARTS}.`, part);
    stages.push(stage);
  });
  return parts.map((part, at) => [stages[at], part]).sort((a, b) => a[0] - b[0]).map(([, part]) => part);
}

/** One variant of attention: y_t = p_t N( o_t G_t Σ_{s≤t} (Π f_r) κ(q_t, k_s) i_s v_s ). */
export class Spec {
  constructor(parts) {
    this.parts = inFormulaOrder(parts);
    const first = (family) => this.parts.find((p) => PARTS[p.name].family === family) ?? null;
    const normAt = this.parts.findIndex((p) => PARTS[p.name].family === "norm");
    const named = (name) => this.parts.filter((p) => p.name === name);
    this.kernel = this.parts[0];
    this.window = first("window");
    this.denominator = first("denominator");
    this.norm = first("norm");
    this.valueGates = named("in");
    this.decayGates = named("forget");
    this.gatesBeforeNorm = named("out").filter((p) => normAt < 0 || this.parts.indexOf(p) < normAt);
    this.gatesAfterNorm = named("out").filter((p) => !this.gatesBeforeNorm.includes(p));
    refuseArgumentsTakenTwice(this);
    for (const part of this.parts) PARTS[part.name].check(part, this);
  }

  get notation() {
    return this.parts.map((p) => PARTS[p.name].mark + print(p)).join("");
  }

  get gates() {
    return this.parts.flatMap((p) => PARTS[p.name].argument ?? []);
  }

  get dependsOnRow() {
    return PARTS[this.kernel.name].dependsOnRow(this.kernel);
  }

  get needsRowSum() {
    return this.denominator?.name === "sum" || this.dependsOnRow;
  }

  get ignoresRowScale() {
    const sum = this.denominator?.name === "sum" ? this.denominator : null;
    const plain = sum !== null && sum.floor === null && sum.eps === null && !sum.detach;
    return plain || this.normIsPerHead;
  }

  get normIsPerHead() {
    return this.norm !== null && PARTS[this.norm.name].perHead(this.norm);
  }

  get orders() {
    return PARTS[this.kernel.name].orders(this.kernel) ?? [];
  }

  get hasFiniteState() {
    return PARTS[this.kernel.name].orders(this.kernel) !== null;
  }

  get hasSeries() {
    return PARTS[this.kernel.name].hasSeries(this.kernel);
  }

  /** Rows of the state for head size d, as a BigInt. */
  features(d) {
    return this.orders.reduce((total, n) => total + multisets(d, n), 0n);
  }

  /** Numbers held per sequence and key-value head, as a BigInt. */
  stateSize(d, e) {
    const scores = this.window?.kept ? this.window.size + this.window.kept : 0;
    const exact = this.window ? BigInt(PARTS.window.slots(this.window) * (d + e) + scores) : 0n;
    return this.features(d) * BigInt(e + (this.needsRowSum ? 1 : 0)) + exact;
  }

  get denominatorCanVanish() {
    return this.denominator !== null && PARTS[this.denominator.name].canVanish(this.denominator, this);
  }

  /** The parts that the norm divides out again. */
  get cancelledParts() {
    if (!this.normIsPerHead) return [];
    const divisor = this.denominator && !this.denominatorCanVanish ? [this.denominator] : [];
    return [...divisor, ...this.gatesBeforeNorm];
  }

  with(old, replacement) {
    return new Spec(this.parts.flatMap((p) => (p === old ? (replacement ?? []) : p)));
  }

  /** An equal spec with fewer or simpler parts, or one that is the same. */
  simplified() {
    for (const rule of RULES) {
      const simpler = rule(this);
      if (simpler.notation !== this.notation) return simpler.simplified();
    }
    return this;
  }

  get formula() {
    return textFormula(this);
  }

  get recurrence() {
    return textRecurrence(this);
  }
}

/** C(d+n−1, n): multisets of size n over d indices. */
export function multisets(d, n) {
  let number = 1n;
  for (let i = 0; i < n; i++) number = (number * BigInt(d + i)) / BigInt(i + 1);
  return number;
}

function refuseArgumentsTakenTwice(spec) {
  for (const name of spec.gates) {
    const takers = spec.parts.filter((p) => PARTS[p.name].argument === name);
    if (takers.length < 2) continue;
    const both = takers.map((p) => PARTS[p.name].mark + print(p)).join(" and ");
    let reason = `${spec.notation} takes ${name} in ${both}, but there is only one ${name}.`;
    if (spec.cancelledParts.includes(takers[0]))
      reason += "\nThe norm cancels the first one: keep the one after it.";
    throw new SpecError(reason, takers[0]);
  }
}

const RULES = [
  function shorterKernel(spec) {
    const kernel = PARTS[spec.kernel.name].simplified(spec.kernel);
    const [now, before] = [PARTS[kernel.name], PARTS[spec.kernel.name]];
    const moves = now.reference(kernel) !== before.reference(spec.kernel) || !now.expandsExp;
    return spec.window && moves ? spec : spec.with(spec.kernel, kernel);
  },
  function normDividesOut(spec) {
    const cancelled = spec.cancelledParts;
    return cancelled.length ? new Spec(spec.parts.filter((p) => !cancelled.includes(p))) : spec;
  },
  function weightsSumToLength(spec) {
    const plain = spec.denominator !== null && print(spec.denominator) === "sum";
    const counts = PARTS[spec.kernel.name].countsKeys(spec.kernel) && !spec.decayGates.length && !spec.window;
    return counts && plain ? spec.with(spec.denominator, make("len")) : spec;
  },
];

// ----------------------------------------------------------------------------------------------- polynomials

const valueAt = (series, x) => series.reduceRight((sum, a) => sum * x + a, 0);

/** Where a polynomial changes sign, from the places where its slope does. */
function signChanges(series) {
  if (series.length < 2) return [];
  const slope = series.slice(1).map((a, i) => a * (i + 1));
  const bound = 1 + Math.max(...series.slice(0, -1).map((a) => Math.abs(a / series.at(-1))));
  const cuts = [-bound, ...signChanges(slope), bound];
  return cuts.slice(1).flatMap((right, i) => {
    let [a, b] = [cuts[i], right];
    if (Math.sign(valueAt(series, a)) * Math.sign(valueAt(series, b)) > 0) return [];
    for (let step = 0; step < 200 && a < b; step++) {
      const middle = (a + b) / 2;
      if (middle === a || middle === b) break;
      if (valueAt(series, middle) === 0) return [middle];
      if (Math.sign(valueAt(series, middle)) === Math.sign(valueAt(series, a))) a = middle;
      else b = middle;
    }
    return [Math.abs(a + b) < 1e-50 * bound ? 0 : (a + b) / 2];
  });
}

function signOfPolynomial(coefficients) {
  const a = coefficients.slice(0, 1 + Math.max(-1, ...nonzero(coefficients)));
  if (a.length === 0) return "nonnegative";
  if (a.length === 1) return a[0] > 0 ? "positive" : "indefinite";
  if (a.length % 2 === 0 || a.at(-1) < 0) return "indefinite";
  const places = signChanges(a.slice(1).map((c, i) => c * (i + 1)));
  const relative = places.map((x) => valueAt(a, x) / (valueAt(a.map(Math.abs), Math.abs(x)) || 1));
  if (relative.every((value) => value > 1e-9)) return "positive";
  return relative.every((value) => value >= -1e-9) ? "nonnegative" : "indefinite";
}

function textOfSeries(series, x) {
  const terms = nonzero(series).map((n) => {
    const power = n === 0 ? "" : n === 1 ? x : `(${x})^${n}`;
    return (n === 0 ? written(series[n]) : series[n] === 1 ? "" : `${written(series[n])}·`) + power;
  });
  return terms.join(" + ").replaceAll("+ -", "− ") || "0";
}

// -------------------------------------------------------------------------------------------------- formulas

function textFormula(spec) {
  const kernel = PARTS[spec.kernel.name];
  const shown = spec.window ? "w_ts" : kernel.text(spec.kernel, "x_ts");
  const weight = /[-+−/\s]/.test(outsideBrackets(shown)) ? `(${shown})` : shown;
  const sum = ["Σ_s≤t", ...(spec.decayGates.length ? ["D_ts"] : []), weight];
  let body = [...sum, ...spec.valueGates.map(() => "i_s"), "v_s"].join(" ");
  if (spec.denominator) body += ` / ${PARTS[spec.denominator.name].text(spec.denominator, sum.join(" "))}`;
  body = [...spec.gatesBeforeNorm.map(() => "o_t"), body].join(" ");
  if (spec.norm) body = `${PARTS[spec.norm.name].text(spec.norm)}( ${body} )`;
  body = [...spec.gatesAfterNorm.map(() => "o_t"), body].join(" ");
  return [`y_t = ${body}`, ...where(spec, kernel)].join("\n");
}

/** What is not between brackets, without signs of exponents. */
function outsideBrackets(text) {
  let [shorter, before] = [text, ""];
  while (shorter !== before) [shorter, before] = [shorter.replace(/\([^()]*\)/g, ""), shorter];
  return shorter.replace(/([0-9.]e)[+-](?=[0-9])/g, "$1");
}

function where(spec, kernel) {
  const feature = kernel.feature(spec.kernel);
  const [q, k] = ["q_t", "k_s"].map((u) => (feature === null ? u : FEATURES[feature].text(u)));
  const lines = [`x_ts = ${kernel.scoreText(spec.kernel, `${q}·${k}`)}`];
  if (spec.window) {
    const words = `for ${PARTS.window.text(spec.window)}, else`;
    lines.push(`w_ts = exp(x_ts − r_t) ${words} ${kernel.text(spec.kernel, "x_ts")}`);
    lines.push(`r_t = ${kernel.reference(spec.kernel)}`);
    if (spec.window.kept)
      lines.push(
        `a_s = Σ_u p_us, over the queries u with s in their window, p the softmax over ${PARTS.window.near(spec.window)}, ` +
          "mean over the queries of a key-value head");
  }
  lines.push(...kernel.where(spec.kernel));
  if (spec.dependsOnRow) lines.push(`x̄ = mean of the scores over ${spec.window ? "the tail" : "the visible keys"}`);
  const weighs = spec.dependsOnRow ? ", which weighs keys in means and variances of scores too" : "";
  if (spec.decayGates.length) lines.push(`D_ts = Π_s<r≤t ${spec.decayGates.map(() => "f_r").join(" ")}${weighs}`);
  return lines;
}

function textRecurrence(spec) {
  const kernel = PARTS[spec.kernel.name];
  if (!spec.hasFiniteState && !spec.hasSeries)
    return `none: no finite state reproduces ${kernel.text(spec.kernel, "x")}`;
  const orders = spec.hasFiniteState ? textOfOrders(spec.orders) : "n = 0, 1, 2, … (truncated at a certified order)";
  const forget = spec.decayGates.map(() => "f_t ").join("");
  const value = spec.valueGates.length ? `(${[...spec.valueGates.map(() => "i_t"), "v_t"].join(" ")})ᵀ` : "v_tᵀ";
  const feature = kernel.feature(spec.kernel);
  const [q, k] = ["q_t", "k_t"].map((u) => {
    const text = feature === null ? u : FEATURES[feature].text(u);
    return text.includes("/") ? `(${text})` : text;
  });
  const entering = !spec.window ? ""
    : spec.window.kept ? "when k_t has left the window and is not, or no longer, kept: " : "when k_t leaves the window: ";
  const isFirst = spec.hasFiniteState && spec.orders.length === 1 && spec.orders[0] === 1;
  const [order, power, which, read] = isFirst
    ? ["", "", "", `a_1 ⟨${q}, S_t⟩`]
    : ["⁽ⁿ⁾", "^⊗n", `,   ${orders}`, `Σ_n a_n ⟨${q}^⊗n, S_t⁽ⁿ⁾⟩`];
  return [
    `${entering}S_t${order} = ${forget}S_t₋₁${order} + ${k}${power} ${value}${which}`,
    ...(spec.needsRowSum ? [`z_t${order} = ${forget}z_t₋₁${order} + ${k}${power}`] : []),
    `y_t reads ${read}, then the denominator, gates and norm as above`,
  ].join("\n");
}

function textOfOrders(orders) {
  if (!orders.length) return "no orders (nothing is kept)";
  const unbroken = orders.every((n, i) => n === orders[0] + i);
  if (orders.length > 6 && unbroken) return `n = ${orders[0]}, ${orders[0] + 1}, …, ${orders.at(-1)}`;
  return `n = ${orders.join(", ")}`;
}
