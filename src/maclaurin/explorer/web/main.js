// The page: settings from the address, controls that change them, panels that draw them.

import { byId, h, saveFile, svgText } from "./draw.js";
import { drawNetwork } from "./network.js";
import { drawParts, notationOfSwitches } from "./parts.js";
import { drawRow } from "./row.js";
import { drawSum } from "./sum.js";
import { MOST_WORDS, fromAddress, initialSettings, readCapture, readSetting, toAddress, wordsOf } from "./settings.js";

const data = JSON.parse(byId("data").textContent);
let settings = initialSettings();
let isPlaying = null;

const currentCapture = () => data.captures[Math.min(settings.capture, data.captures.length - 1)];

/** Change settings, draw, and write them into the address. */
function act(changes) {
  settings = { ...settings, ...changes };
  draw();
  writeAddress();
}

function writeAddress() {
  const address = toAddress(settings);
  history.replaceState(null, "", address ? `#${address}` : location.href.split("#")[0]);
}

/** Show a message at the bottom of the page; an empty text hides it. */
function say(text) {
  const place = byId("message");
  place.textContent = text;
  place.hidden = !text;
}

/** Set a setting from the user's text; an invalid text shows a message and changes nothing. */
function take(name, text, input = null) {
  const { value, problem } = readSetting(name, text);
  if (problem === undefined) {
    say("");
    act({ [name]: value });
  } else {
    say(`${problem[0].toUpperCase()}${problem.slice(1)} It stays ${name === "sentence" || name === "words" ? "as it was" : settings[name]}.`);
    if (input) input.value = settings[name];
  }
}

// ------------------------------------------------------------------------------------------------------- drawing

function draw() {
  drawControls();
  drawRow(settings, currentCapture(), act);
  drawNetwork(settings, act);
  drawParts(settings, data.catalogue, act);
}

function drawControls() {
  for (const name of ["order", "net", "size", "chunk"]) {
    if (document.activeElement !== byId(name)) byId(name).value = settings[name];
  }
  if (document.activeElement !== byId("order-number")) byId("order-number").value = settings.order;
  for (const name of ["words", "sentence"]) if (document.activeElement !== byId(name)) byId(name).value = settings[name];
  for (const name of ["kernel", "about", "form"])
    for (const input of document.querySelectorAll(`input[name="${name}"]`)) input.checked = input.value === settings[name];
  byId("net-says").textContent = settings.net;
  byId("size-says").textContent = settings.size;
  byId("chunk-says").textContent = settings.chunk;
  const captures = byId("captures");
  captures.hidden = data.captures.length < 2;
  byId("capture").replaceChildren(...data.captures.map((each, i) => h("option", { value: i, selected: i === Math.min(settings.capture, data.captures.length - 1) }, each.model)));
}

// ------------------------------------------------------------------------------------------------------ controls

function listen() {
  const on = (id, event, run) => byId(id).addEventListener(event, run);
  for (const name of ["kernel", "about", "form"])
    for (const input of document.querySelectorAll(`input[name="${name}"]`)) input.addEventListener("change", () => act({ [name]: input.value }));
  for (const name of ["order", "net", "size", "chunk", "step"]) on(name, "input", (event) => act({ [name]: Number(event.target.value) }));
  on("order-number", "change", (event) => take("order", event.target.value, event.target));
  on("words", "change", (event) => take("words", event.target.value, event.target));
  on("sentence", "change", (event) => take("sentence", event.target.value, event.target));
  on("capture", "change", (event) => act({ capture: Number(event.target.value), source: "head" }));
  for (const button of document.querySelectorAll("[data-preset]"))
    button.addEventListener("click", () => act({ source: "own", scores: preset(button.dataset.preset) }));
  on("back", "click", () => act({ step: Math.max(1, settings.step - 1) }));
  on("next", "click", () => act({ step: Math.min(wordsOf(settings.sentence).length, settings.step + 1) }));
  on("play", "click", togglePlay);
  on("draw-again", "click", () => act({ seed: (settings.seed % 999) + 1 }));
  on("notation", "input", (event) => act({ spec: event.target.value }));
  for (const input of document.querySelectorAll("[data-part]"))
    input.addEventListener("input", () => { byId("notation").blur(); act({ spec: notationOfSwitches() }); });
  for (const gate of ["in", "forget", "out"]) on(`gate-${gate}`, "input", (event) => act({ [gate]: Number(event.target.value) }));
  on("reset", "click", () => { say(""); act(initialSettings()); });
  on("copy", "click", copyAddress);
  on("load", "change", (event) => loadFile(event.target));
  on("theme", "click", changeTheme);
  for (const button of document.querySelectorAll("[data-save]"))
    button.addEventListener("click", () => saveFile(`maclaurin-${button.dataset.save}.svg`, svgText(byId(button.dataset.save).querySelector("svg")), "image/svg+xml"));
  window.addEventListener("hashchange", readAddress);
  let width = innerWidth;
  window.addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
}

function preset(name) {
  const count = wordsOf(settings.words).length;
  const wave = (i) => Math.round(4 * Math.sin(i * 2.1)) / 4;
  const all = { flat: wave, sharp: (i) => (i === Math.floor(count / 2) ? 9 : wave(i)), far: (i) => wave(i) - 8 };
  return Array.from({ length: count }, (_, i) => all[name](i)).join(",");
}

function togglePlay() {
  if (isPlaying !== null) return stopPlaying();
  byId("play").textContent = "Stop";
  if (settings.step >= wordsOf(settings.sentence).length) act({ step: 1 });
  isPlaying = setInterval(() => {
    const last = wordsOf(settings.sentence).length;
    if (settings.step >= last) return stopPlaying();
    act({ step: settings.step + 1 });
  }, 700);
}

function stopPlaying() {
  clearInterval(isPlaying);
  isPlaying = null;
  byId("play").textContent = "Play";
}

async function copyAddress() {
  try {
    await navigator.clipboard.writeText(location.href);
    byId("copy").textContent = "Copied";
  } catch {
    say(`This browser does not let a page copy. The link is in the address bar: ${location.href}`);
  }
  setTimeout(() => (byId("copy").textContent = "Copy the link"), 1500);
}

async function loadFile(input) {
  const [file] = input.files;
  if (!file) return;
  try {
    if (file.size > 20e6) throw new Error("that file is larger than 20 MB, so it is not a capture for this page.");
    const capture = readCapture(await file.text());
    data.captures.unshift(capture);
    say("");
    act({ capture: 0, source: "head", head: 0, query: 63 });
    byId("row").scrollIntoView();
  } catch (problem) {
    say(`${file.name}: ${problem.message} The scores are unchanged.`);
  }
  input.value = "";
}

function changeTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("maclaurin-theme", root.dataset.theme); } catch { /* a page from disk may have no storage */ }
}

// -------------------------------------------------------------------------------------------------- laws and code

function listSources() {
  for (const [panel, sources] of Object.entries(data.sources)) {
    const links = sources.map((source) => h("li", {},
      h("span", { class: "kind" }, source.name.startsWith("test_") ? "law" : "code"), " ",
      source.text === null
        ? h("span", {}, h("code", {}, source.name), ` in ${source.file}`)
        : h("a", { href: `#${source.name}`, onclick: (event) => { event.preventDefault(); showSource(source); } }, h("code", {}, source.name))));
    byId(`${panel}-sources`).replaceChildren(...links);
  }
  for (const node of document.querySelectorAll("[data-docs]")) {
    if (data.docs === null) node.remove();
    else node.href = data.docs + node.dataset.docs;
  }
  byId("version").textContent = data.version;
  byId("most-words").textContent = MOST_WORDS;
  byId("names").replaceChildren(...data.catalogue.map((entry) => h("option", { value: entry.name }, entry.notation)));
}

function showSource({ name, file, text }) {
  byId("source-name").textContent = name;
  byId("source-file").textContent = file;
  byId("source-text").textContent = text;
  byId("source").showModal();
}

/** Settings from the address; an address that only names a panel, as the links at the top do, changes nothing. */
function readAddress() {
  const place = byId(location.hash.slice(1));
  if (place) {
    writeAddress();
    draw();
    place.scrollIntoView();
    return;
  }
  const read = fromAddress(location.hash);
  settings = read.settings;
  say(read.problems.length ? `From the address: ${read.problems.join(" ")} The other settings were applied.` : "");
  draw();
}

drawSum(data.captures.at(-1));
listSources();
listen();
readAddress();
document.documentElement.dataset.ready = "true";
