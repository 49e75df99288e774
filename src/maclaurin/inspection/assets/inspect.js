"use strict";
(() => {
  // The map of heads: colours for one measure at a time, and everything about the head that is chosen.
  const SPACE = "http://www.w3.org/2000/svg";
  const holder = document.getElementById("heat");
  const data = JSON.parse(document.getElementById("heat-data").textContent);
  const make = (name, attributes = {}, ...children) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const draw = (name, attributes = {}, text = null) => {
    const node = document.createElementNS(SPACE, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    return node;
  };
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const minus = (text) => text.replace(/-/g, "\u2212");
  const number = (value) => minus(value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? value.toExponential(1) : String(Number(value.toPrecision(3))));
  const told = (value, kind) => {
    if (value === null) return kind === "order" ? `> ${data.highest}` : "\u2013";
    return kind === "share" || kind === "error" ? `${number(100 * value)} %` : number(value);
  };
  const byPlace = new Map(data.cells.map((cell) => [cell.at.slice(0, 2).join("."), cell]));
  let measure = 0;
  let chosen = data.chosen;

  // ------------------------------------------------------------------------------------------ the map
  const select = make("select", { "aria-label": "What the colours show" });
  data.measures.forEach((each, place) => select.append(make("option", { value: place }, each.title)));
  const map = make("div", { class: "panel" });
  const ramp = make("div", { class: "scale" });
  const left = make("div", {}, map, ramp);
  const detail = make("div", { class: "detail", "aria-live": "polite" });
  holder.append(make("label", { class: "choice" }, "Colours show", select), left, detail);
  const tip = make("div", { class: "tip", role: "status" });
  tip.hidden = true;
  map.append(tip);

  const shades = () => {
    const { kind } = data.measures[measure];
    const raw = data.cells.map((cell) => cell.values[measure]).filter((value) => value !== null);
    const logged = kind === "error" && raw.every((value) => value > 0);
    const f = logged ? Math.log : (value) => value;
    const [low, high] = [Math.min(...raw), Math.max(...raw)];
    const over = raw.length < data.cells.length;
    return { kind, low, high, over, empty: !raw.length, of: (value) => (high === low ? 0.5 : (f(value) - f(low)) / (f(high) - f(low))) };
  };

  const renderMap = () => {
    const width = Math.max(240, map.clientWidth || 320);
    const label = 30;
    const across = clamp((width - label) / data.heads, 3, 44);
    const down = clamp(560 / data.layers, 9, 22);
    const height = data.layers * down + 34;
    const shade = shades();
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0" });
    svg.setAttribute("aria-label", `${data.measures[measure].title}, ${data.layers} layers of ${data.heads} heads; arrow keys choose a head`);
    const gap = across > 8 ? 1 : 0.3;
    for (const cell of data.cells) {
      const [layer, head] = cell.at;
      const value = cell.values[measure];
      const kind = value === null ? (shade.kind === "order" ? "over" : "none") : "";
      const square = draw("rect", { class: `cell ${kind}`, x: label + head * across, y: layer * down, width: across - gap, height: down - gap, "data-head": `${layer}.${head}` });
      if (value !== null) square.style.setProperty("--f", shade.of(value).toFixed(3));
      svg.append(square);
    }
    const rows = Math.max(1, Math.ceil(14 / down));
    for (let layer = 0; layer < data.layers; layer += rows) svg.append(draw("text", { x: label - 6, y: layer * down + down / 2 + 4, "text-anchor": "end" }, String(layer)));
    const columns = Math.max(1, Math.ceil(22 / across));
    for (let head = 0; head < data.heads; head += columns) svg.append(draw("text", { x: label + head * across + across / 2, y: data.layers * down + 14, "text-anchor": "middle" }, String(head)));
    svg.append(draw("text", { x: label + (data.heads * across) / 2, y: data.layers * down + 30, "text-anchor": "middle" }, "head"));
    svg.append(draw("rect", { class: "mark", x: label + chosen[1] * across - 0.5, y: chosen[0] * down - 0.5, width: across, height: down, rx: 2 }));
    listen(svg);
    const before = map.querySelector("svg");
    const focused = before !== null && before === document.activeElement;
    if (before) before.replaceWith(svg); else map.prepend(svg);
    if (focused) svg.focus();
    ramp.replaceChildren();
    if (!shade.empty) ramp.append(told(shade.low, shade.kind), make("span", { class: "ramp" }), told(shade.high, shade.kind));
    if (shade.over && shade.kind === "order") ramp.append(make("span", { class: "swatch" }), `more than ${data.highest}`);
  };

  const choose = (layer, head) => {
    if (!byPlace.has(`${layer}.${head}`)) return;
    chosen = [layer, head];
    renderMap();
    renderDetail();
  };

  const listen = (svg) => {
    const cellAt = (event) => event.target.dataset?.head;
    svg.addEventListener("click", (event) => { const at = cellAt(event); if (at) choose(...at.split(".").map(Number)); });
    svg.addEventListener("pointermove", (event) => {
      const at = cellAt(event);
      if (!at) { tip.hidden = true; return; }
      const [layer, head] = at.split(".");
      const { title, kind } = data.measures[measure];
      tip.replaceChildren(make("b", {}, `layer ${layer}, head ${head}`), make("br"), `${title}: ${told(byPlace.get(at).values[measure], kind)}`);
      tip.hidden = false;
      const frame = map.getBoundingClientRect();
      const x = event.clientX - frame.left + 14;
      tip.style.left = `${clamp(x, 0, Math.max(0, map.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${clamp(event.clientY - frame.top + 16, 0, Math.max(0, map.clientHeight - tip.offsetHeight))}px`;
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      choose(chosen[0] + step[0], chosen[1] + step[1]);
    });
  };

  // --------------------------------------------------------------------------------------- one head
  const frameOf = (title, xLabel, xs, ys, log) => {
    const width = Math.max(240, detail.clientWidth || 420);
    const height = 190;
    const box = { left: 50, right: width - 10, top: 24, bottom: height - 36 };
    const f = log ? Math.log10 : (value) => value;
    const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    let [y0, y1] = [f(Math.min(...ys)), f(Math.max(...ys))];
    if (y1 - y0 < 1e-9) { y0 -= 0.5; y1 += 0.5; }
    const sx = (x) => box.left + ((x - x0) / (x1 - x0 || 1)) * (box.right - box.left);
    const sy = (y) => box.bottom - ((f(y) - y0) / (y1 - y0)) * (box.bottom - box.top);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} against ${xLabel}` });
    svg.append(draw("text", { x: 2, y: 14, class: "title" }, title));
    const every = Math.max(1, Math.ceil((y1 - y0) / 5));
    const ticks = log ? [] : [0, (y0 + y1) / 2, y1];
    if (log) for (let p = Math.ceil(y0); p <= y1; p += every) ticks.push(10 ** p);
    for (const y of ticks) {
      svg.append(draw("line", { class: "grid", x1: box.left, x2: box.right, y1: sy(y), y2: sy(y) }));
      svg.append(draw("text", { x: box.left - 6, y: sy(y) + 4, "text-anchor": "end" }, number(y)));
    }
    const step = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50].find((s) => (x1 - x0) / s <= 9) ?? 100;
    for (let x = Math.ceil(x0 / step) * step; x <= x1; x += step) svg.append(draw("text", { x: sx(x), y: box.bottom + 16, "text-anchor": "middle" }, minus(String(x))));
    svg.append(draw("line", { class: "grid", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    svg.append(draw("text", { x: (box.left + box.right) / 2, y: box.bottom + 31, "text-anchor": "middle" }, xLabel));
    return { svg, sx, sy, box };
  };

  const panel = (svg, names) => {
    const key = make("div", { class: "key" });
    for (const [name, colour] of names) key.append(make("span", {}, make("i", { style: `--colour:${colour}` }), name));
    return [make("div", { class: "panel" }, svg), key];
  };

  const curves = (title, lines) => {
    const drawable = lines.map((line) => ({ ...line, points: line.values.map((y, x) => [x, y]).filter(([, y]) => y !== null && y > 1e-18) }));
    const all = drawable.flatMap((line) => line.points);
    if (!all.length) return [];
    const { svg, sx, sy, box } = frameOf(title, "order", [0, data.highest], all.map(([, y]) => clamp(y, 1e-12, 1e12)), true);
    for (const line of drawable) {
      const d = line.points.map(([x, y], i) => `${i ? "L" : "M"}${sx(x).toFixed(1)} ${sy(clamp(y, 1e-12, 1e12)).toFixed(1)}`).join("");
      svg.append(draw("path", { class: "curve", d, style: `--colour:${line.colour}` }));
    }
    if (lines.length > 1 && sy(data.tolerance) < box.bottom && sy(data.tolerance) > box.top) {
      svg.append(draw("line", { class: "rule", x1: box.left, x2: box.right, y1: sy(data.tolerance), y2: sy(data.tolerance) }));
    }
    return panel(svg, lines.map((line) => [line.name, line.colour]));
  };

  const bars = (title, groups) => {
    const xs = groups.flatMap(({ bins }) => [bins.start, bins.start + bins.width * bins.shares.length]);
    const { svg, sx, sy, box } = frameOf(title, "score x", xs, [0, ...groups.flatMap(({ bins }) => bins.shares)], false);
    for (const { bins, colour } of groups) {
      bins.shares.forEach((share, i) => {
        const [a, b] = [sx(bins.start + i * bins.width), sx(bins.start + (i + 1) * bins.width)];
        if (share) svg.append(draw("rect", { class: "bar", x: a, width: Math.max(0.5, b - a - 0.6), y: sy(share), height: box.bottom - sy(share), style: `--colour:${colour}` }));
      });
    }
    return panel(svg, groups.map(({ name, colour }) => [name, colour]));
  };

  const even = (values) => values.map((value, order) => (order % 2 ? null : value)); // odd row sums can vanish

  const renderDetail = () => {
    const cell = byPlace.get(chosen.join("."));
    const [layer, head, kv] = cell.at;
    const list = make("dl");
    data.measures.forEach(({ title, kind }, place) => list.append(make("dt", {}, title), make("dd", {}, told(cell.values[place], kind))));
    detail.replaceChildren(
      make("h3", {}, `Layer ${layer}, head ${head}`),
      ...curves("error of the output, even orders", [
        { name: "about the row mean", values: even(cell.mean), colour: "var(--c0)" },
        { name: "about zero", values: even(cell.zero), colour: "var(--c1)" },
      ]),
      ...curves("size of each term, relative to the whole", [{ name: "\u2016\u03a3 x\u207fv/n!\u2016 over \u2016\u03a3 e\u02e3v\u2016", values: cell.terms, colour: "var(--c2)" }]),
      ...bars("scores", [
        { name: "all scores, share", bins: cell.scores, colour: "var(--c5)" },
        { name: "row means, share", bins: cell.rows, colour: "var(--c3)" },
      ]),
      make("p", { class: "note" }, `Keys and values: head ${kv}.`),
      list,
    );
  };

  select.addEventListener("change", () => { measure = Number(select.value); renderMap(); });
  let width = 0;
  const fit = () => {
    if (holder.clientWidth === width) return;
    width = holder.clientWidth;
    renderMap();
    renderDetail();
  };
  fit();
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(holder);
})();
