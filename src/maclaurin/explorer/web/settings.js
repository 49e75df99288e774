// Every setting of the page, its limits, and how it is written into the address.

export const MOST_WORDS = 16;
export const HIGHEST = 16;
const SENTENCE = "the cat sat on the mat and the dog sat on the log";

const inRange = (least, most) => ({
  read: (text) => {
    const value = Number(text);
    return text.trim() !== "" && Number.isInteger(value) && value >= least && value <= most ? value : undefined;
  },
  possible: `a whole number from ${least} to ${most}`,
});
const unitInterval = {
  read: (text) => (text.trim() !== "" && Number(text) >= 0 && Number(text) <= 1 ? Number(text) : undefined),
  possible: "a number from 0 to 1",
};
const among = (...words) => ({ read: (text) => (words.includes(text) ? text : undefined), possible: words.join(", ") });
const words = {
  read: (text) => {
    const found = wordsOf(text);
    return found.length >= 1 && found.length <= MOST_WORDS ? found.join(" ") : undefined;
  },
  possible: `1 to ${MOST_WORDS} words`,
};
const scores = {
  read: (text) => {
    const found = text.split(",").map(Number);
    const fits = found.length <= MOST_WORDS && found.every((x) => Number.isFinite(x) && Math.abs(x) <= 12);
    return text && fits ? found.join(",") : undefined;
  },
  possible: `up to ${MOST_WORDS} numbers from −12 to 12 separated by commas`,
};
const anyText = { read: (text) => text, possible: "any text" };

/** name → its initial value, how it is parsed, and what is possible. */
export const SETTINGS = {
  source: { initial: "head", ...among("head", "own") },
  capture: { initial: 0, ...inRange(0, 9) },
  head: { initial: 2, ...inRange(0, 5) },
  query: { initial: 63, ...inRange(0, 63) },
  kernel: { initial: "mean", ...among("exp", "zero", "mean") },
  order: { initial: 6, ...inRange(0, HIGHEST) },
  words: { initial: "one of these keys is for you", ...words },
  scores: { initial: "0,1,0.5,2,-1,4,1.5", ...scores },
  sentence: { initial: SENTENCE, ...words },
  size: { initial: 2, ...inRange(1, 3) },
  net: { initial: 2, ...inRange(0, 4) },
  about: { initial: "zero", ...among("zero", "mean") },
  form: { initial: "chunked", ...among("parallel", "chunked", "recurrent") },
  chunk: { initial: 4, ...inRange(1, 8) },
  step: { initial: 5, ...inRange(1, MOST_WORDS) },
  seed: { initial: 1, ...inRange(1, 999) },
  spec: { initial: "exp/len*out/l2", ...anyText },
  out: { initial: 0.5, ...unitInterval },
  forget: { initial: 0.8, ...unitInterval },
  in: { initial: 0.3, ...unitInterval },
};

export const wordsOf = (text) => text.trim().split(/\s+/).filter(Boolean);

export const initialSettings = () => Object.fromEntries(Object.entries(SETTINGS).map(([name, s]) => [name, s.initial]));

/** A value for a setting, or a message with what is possible: { value } or { problem }. */
export function readSetting(name, text) {
  const value = SETTINGS[name].read(String(text));
  if (value !== undefined) return { value };
  return { problem: `${name} can be ${SETTINGS[name].possible}; “${String(text).slice(0, 60)}” is not.` };
}

/** The settings as the part of an address after #; those at their initial value are left out. */
export function toAddress(settings) {
  const changed = Object.keys(SETTINGS).filter((name) => settings[name] !== SETTINGS[name].initial);
  return new URLSearchParams(changed.map((name) => [name, String(settings[name])])).toString();
}

/** The settings of an address, and messages about parts that could not be used. */
export function fromAddress(hash) {
  const settings = initialSettings();
  const problems = [];
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!Object.hasOwn(SETTINGS, name)) problems.push(`the address names “${name}”, which is not a setting of this page.`);
    else {
      const { value, problem } = readSetting(name, text);
      if (problem) problems.push(problem);
      else settings[name] = value;
    }
  }
  return { settings, problems };
}

/** A file as a capture, or an Error that says what is wrong with it. */
export function readCapture(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("that file is not JSON. Make a capture with: maclaurin explore MODEL --text FILE --capture scores.json");
  }
  const isCapture = data?.kind === "maclaurin-capture" && Array.isArray(data.tokens) && Array.isArray(data.heads);
  if (!isCapture)
    throw new Error("that file is JSON but not a capture of scores. Make one with: maclaurin explore MODEL --text FILE --capture scores.json");
  if (data.version !== 1) throw new Error(`that capture has version ${data.version}, but this page reads version 1: make it again.`);
  const length = data.tokens.length;
  const numbers = (row, size) => Array.isArray(row) && row.length === size && row.every(Number.isFinite);
  const complete = (head) =>
    head.scores?.length === length && head.values?.length === length &&
    head.scores.every((row, t) => numbers(row, t + 1)) && head.values.every((row) => numbers(row, head.values[0].length));
  if (length < 2 || length > 64 || !data.heads.length || data.heads.length > 6 || !data.heads.every(complete))
    throw new Error("that capture is damaged: it must hold 2 to 64 tokens and 1 to 6 heads with a score for every pair.");
  return data;
}
