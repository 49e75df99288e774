"use strict";
(() => {
  // ------------------------------------------------------------------------------------- small things
  const SPACE = "http://www.w3.org/2000/svg";
  const EARLY = 0.2; // share of the steps whose steep descent is cut off at first
  const DASHES = ["", "7 4", "2 4", "10 3 2 3"];
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
  const colour = (look) => (look.colour < 0 ? "var(--ink)" : `var(--c${look.colour})`);
  const minus = (text) => text.replace(/-/g, "\u2212");
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  const bytes = (value) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let place = 0;
    while (value >= 1024 && place < 4) { value /= 1024; place += 1; }
    return `${Number(value.toPrecision(3))} ${units[place]}`;
  };
  const short = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return minus(value.toExponential(0));
    if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
    return minus(String(Number(value.toPrecision(5))));
  };
  const tenth = (value) => {
    const raised = [...String(Math.round(Math.log10(value)))].map((letter) => (letter === "-" ? "\u207b" : "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[letter]));
    return value === 1 ? "1" : value === 10 ? "10" : `10${raised.join("")}`;
  };
  const exact = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return minus(value.toExponential(1));
    return minus(Number.isInteger(value) && size >= 100 ? value.toLocaleString("en") : value.toFixed(3));
  };

  // ---------------------------------------------------------------------------------------- the theme
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const tellTheme = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
    button.setAttribute("aria-pressed", String(isDark()));
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("maclaurin-theme", root.dataset.theme); } catch { /* private windows */ }
    tellTheme();
  });
  prefersDark.addEventListener("change", tellTheme);
  tellTheme();

  // -------------------------------------------------------------------------------------- the contents
  const links = new Map();
  for (const link of document.querySelectorAll("nav a")) {
    const target = document.getElementById(link.hash.slice(1));
    if (target) links.set(target, link);
  }
  const followReader = () => {
    let here = null;
    for (const [target, link] of links) {
      link.classList.remove("here");
      link.removeAttribute("aria-current");
      if (target.getBoundingClientRect().top < innerHeight * 0.35) here = link;
    }
    if (here) { here.classList.add("here"); here.setAttribute("aria-current", "true"); }
  };
  let waiting = false;
  addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; followReader(); });
  }, { passive: true });
  followReader();

  // --------------------------------------------------------------------------------------- the tables
  const compare = (a, b) => {
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y || 0;
  };
  const infinity = (text) => (text === "inf" ? "Infinity" : text === "-inf" ? "-Infinity" : text);
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => {
        const cell = row.cells[place];
        return [infinity(cell.dataset.value ?? (cell.textContent.trim() === "\u2013" ? "" : cell.textContent.trim())), row];
      });
      rows.sort(([a], [b]) => (a === "" || b === "" ? (a === "") - (b === "") : (up ? 1 : -1) * compare(a, b)));
      body.append(...rows.map(([, row]) => row));
    }));
  }

  // ---------------------------------------------------------------------------------------- the scales
  const linearTicks = (low, high, wanted) => {
    const rough = (high - low) / wanted;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((s) => s >= rough * 0.999);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  };
  const logTicks = (low, high, wanted, base) => {
    const from = Math.floor(Math.log(low) / Math.log(base) + 1e-9);
    const to = Math.ceil(Math.log(high) / Math.log(base) - 1e-9);
    const every = Math.max(1, Math.ceil((to - from) / wanted));
    const ticks = [];
    for (let p = Math.ceil(from / every) * every; p <= to; p += every) ticks.push(base ** p);
    return ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
  };
  const scale = (low, high, log, from, to) => {
    const f = log ? Math.log : (v) => v;
    const [a, b] = [f(low), f(high)];
    return (value) => from + ((f(value) - a) / (b - a || 1)) * (to - from);
  };
  const widened = (low, high, log, by) => {
    if (log) { const pad = Math.max((high / low) ** by, 1.05); return [low / pad, high * pad]; }
    const pad = (high - low) * by || Math.abs(high) * 0.05 || 1;
    return [low - pad, high + pad];
  };

  // --------------------------------------------------------------------------------------- the tooltip
  const tooltip = (panel) => {
    const box = make("div", { class: "tip", role: "status" });
    box.hidden = true;
    panel.append(box);
    return {
      show(x, y, title, rows) {
        box.replaceChildren(make("b", {}, title));
        for (const row of rows) {
          const dot = make("i", { style: `--colour:${row.colour}` });
          box.append(make("div", {}, dot, make("span", {}, row.name), make("em", {}, row.text)));
        }
        box.hidden = false;
        const [width, height] = [box.offsetWidth, box.offsetHeight];
        const left = x + 14 + width > panel.clientWidth ? x - width - 14 : x + 14;
        box.style.left = `${clamp(left, 0, Math.max(0, panel.clientWidth - width))}px`;
        box.style.top = `${clamp(y - height / 2, 0, Math.max(0, panel.clientHeight - height))}px`;
      },
      hide() { box.hidden = true; },
    };
  };
  const pointIn = (svg, event) => {
    const frame = svg.getBoundingClientRect();
    const view = svg.viewBox.baseVal;
    return [((event.clientX - frame.left) * view.width) / frame.width, ((event.clientY - frame.top) * view.height) / frame.height];
  };
  const pathOf = (points, sx, sy) => points.map(([x, y], i) => `${i ? "L" : "M"}${sx(x).toFixed(1)} ${sy(y).toFixed(1)}`).join("");

  // ----------------------------------------------------------------------------------- lines and points
  class Lines {
    constructor(holder, data) {
      this.holder = holder;
      this.data = data;
      this.whole = false;
      this.on = data.series.map((line) => line.on !== false);
      this.buttons = [];
      holder.append(this.legend());
      this.panels = make("div", { class: data.panels.length > 1 ? "panels two" : "panels" });
      holder.append(this.panels);
      this.views = data.panels.map((axes, place) => {
        const node = make("div", { class: "panel" });
        this.panels.append(node);
        return { axes, place, node, tip: tooltip(node), at: -1 };
      });
    }

    legend() {
      const bar = make("div", { class: "legend", role: "group", "aria-label": "Curves shown" });
      if (this.data.series.length < 2) return bar;
      this.data.series.forEach((line, place) => {
        const sample = draw("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" });
        sample.append(draw("line", { x1: 1, x2: 21, y1: 4, y2: 4, style: `--colour:${colour(line)}`, "stroke-dasharray": DASHES[line.dash % 4] }));
        const node = make("button", { type: "button", "aria-pressed": String(this.on[place]) }, sample, line.name);
        node.addEventListener("click", () => { this.on[place] = !this.on[place]; this.press(); });
        for (const [name, lit] of [["pointerenter", true], ["focus", true], ["pointerleave", false], ["blur", false]]) {
          node.addEventListener(name, () => this.light(place, lit));
        }
        this.buttons.push(node);
        bar.append(node);
      });
      if (this.data.series.length > 3) {
        const all = make("button", { type: "button", class: "all" }, "all / none");
        all.addEventListener("click", () => { this.on.fill(!this.on.every(Boolean)); this.press(); });
        bar.append(all);
      }
      if (this.data.panels.some((axes) => axes.late)) {
        const whole = make("button", { type: "button", class: "all", "aria-pressed": "false" }, "whole range");
        whole.addEventListener("click", () => {
          this.whole = !this.whole;
          whole.setAttribute("aria-pressed", String(this.whole));
          this.render();
        });
        bar.append(whole);
      }
      return bar;
    }

    press() {
      this.buttons.forEach((node, place) => node.setAttribute("aria-pressed", String(this.on[place])));
      this.render();
    }

    light(place, lit) {
      for (const view of this.views) {
        view.svg.classList.toggle("lit", lit && this.on[place]);
        for (const group of view.svg.querySelectorAll(".series")) group.classList.toggle("hot", Number(group.dataset.place) === place);
      }
    }

    render() { for (const view of this.views) this.renderPanel(view); }

    shown(view) {
      return this.data.series
        .map((line, place) => ({ ...line, place, ...line.panels[view.place] }))
        .filter((line) => this.on[line.place] && (line.mean.length || line.seeds.length));
    }

    extent(view, lines) {
      const { axes } = view;
      const everything = lines.flatMap((line) => [...line.mean, ...line.seeds.flatMap((seed) => seed.points)]);
      if (!everything.length) return null;
      const xs = everything.map(([x]) => x);
      const [left, right] = [Math.min(...xs), Math.max(...xs)];
      const steady = lines.flatMap((line) => (line.mean.length ? line.mean : line.seeds.flatMap((seed) => seed.points)));
      const late = axes.late && !this.whole ? steady.filter(([x]) => x >= left + (right - left) * EARLY) : steady;
      const used = late.length ? late : steady;
      const ys = used.flatMap(([, y, low, high]) => [y, low, high]).filter((y) => y !== null && y !== undefined);
      for (const line of lines) {
        for (const seed of line.seeds) if (!seed.diverged) ys.push(...seed.points.filter(([x]) => !axes.late || this.whole || x >= left + (right - left) * EARLY).map(([, y]) => y));
      }
      for (const rule of axes.rules ?? []) ys.push(rule.value);
      const [low, high] = widened(Math.min(...ys), Math.max(...ys), axes.ylog, 0.05);
      const [a, b] = this.data.markers ? widened(left, right, axes.xlog, 0.05) : right === left ? [left - 1, left + 1] : [left, right];
      return { left: a, right: b, low, high };
    }

    renderPanel(view) {
      const { axes, node, tip } = view;
      const width = Math.max(260, node.clientWidth || 640);
      const height = clamp(Math.round(width * (this.views.length > 1 ? 0.72 : 0.46)), 250, 400);
      const lines = this.shown(view);
      const box = this.extent(view, lines);
      const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0" });
      svg.setAttribute("aria-label", `${axes.y} against ${axes.x}: ${lines.map((line) => line.name).join(", ") || "nothing is switched on"}`);
      if (view.svg) view.svg.replaceWith(svg); else node.prepend(svg);
      view.svg = svg;
      tip.hide();
      svg.append(draw("text", { x: 2, y: 14, class: "title" }, axes.title));
      if (!box) {
        svg.append(draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no curve is switched on"));
        return;
      }
      const frame = { left: axes.ylog ? 58 : 48, right: width - 12, top: 28, bottom: height - 38 };
      const sx = scale(box.left, box.right, axes.xlog, frame.left, frame.right);
      const sy = scale(box.low, box.high, axes.ylog, frame.bottom, frame.top);
      this.axes(svg, axes, box, frame, sx, sy);
      const clip = `clip-${Math.random().toString(36).slice(2)}`;
      const cut = draw("clipPath", { id: clip });
      cut.append(draw("rect", { x: frame.left - 1, y: frame.top - 4, width: frame.right - frame.left + 8, height: frame.bottom - frame.top + 5 }));
      const plot = draw("g", { "clip-path": `url(#${clip})` });
      svg.append(cut, plot);
      for (const rule of axes.rules ?? []) {
        if (rule.low !== null && rule.high !== null) {
          plot.append(draw("rect", { class: "band", x: frame.left, width: frame.right - frame.left, y: sy(rule.high), height: Math.max(0, sy(rule.low) - sy(rule.high)) }));
        }
        plot.append(draw("line", { class: "rule", x1: frame.left, x2: frame.right, y1: sy(rule.value), y2: sy(rule.value) }));
        plot.append(draw("text", { x: frame.left + 4, y: sy(rule.value) - 5, class: "name" }, rule.name));
      }
      for (const line of [...lines].reverse()) plot.append(this.series(line, sx, sy));
      this.hovering(view, lines, frame, sx, sy);
    }

    axes(svg, axes, box, frame, sx, sy) {
      const name = (value) => (axes.bytes ? bytes(value) : short(value));
      const columns = Math.max(2, Math.floor((frame.right - frame.left) / (axes.bytes ? 80 : 58)));
      let xs = axes.xlog ? logTicks(box.left, box.right, columns, 2) : linearTicks(box.left, box.right, columns);
      if (!axes.xlog) xs = xs.filter(Number.isInteger); // steps and orders
      const ys = axes.ylog ? logTicks(box.low, box.high, 6, 10) : linearTicks(box.low, box.high, 5);
      for (const y of ys) {
        svg.append(draw("line", { class: "grid", x1: frame.left, x2: frame.right, y1: sy(y), y2: sy(y) }));
        svg.append(draw("text", { x: frame.left - 7, y: sy(y) + 4, "text-anchor": "end" }, axes.ylog ? tenth(y) : short(y)));
      }
      for (const x of xs) {
        svg.append(draw("line", { class: "grid", x1: sx(x), x2: sx(x), y1: frame.bottom, y2: frame.bottom + 4 }));
        const half = name(x).length * 3.6;
        svg.append(draw("text", { x: Math.min(sx(x), frame.right + 11 - half), y: frame.bottom + 18, "text-anchor": "middle" }, name(x)));
      }
      svg.append(draw("line", { class: "grid", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }));
      svg.append(draw("text", { x: (frame.left + frame.right) / 2, y: frame.bottom + 34, "text-anchor": "middle" }, axes.x));
    }

    series(line, sx, sy) {
      const group = draw("g", { class: "series", "data-place": line.place, "data-name": line.name, style: `--colour:${colour(line)}` });
      const dash = DASHES[line.dash % 4];
      for (const seed of line.seeds) {
        if (line.seeds.length > 1 || seed.diverged || !line.mean.length) group.append(draw("path", { class: "seed", d: pathOf(seed.points, sx, sy) }));
        if (seed.diverged && seed.points.length) {
          const [x, y] = seed.points.at(-1);
          group.append(draw("path", { class: "end", d: `M${sx(x) - 4} ${sy(y) - 4}l8 8m0 -8l-8 8` }));
        }
      }
      for (const [x, y, low, high] of line.mean) {
        if (low !== null && low !== undefined) group.append(draw("path", { class: "whisker", d: `M${sx(x)} ${sy(low)}V${sy(high)}` }));
        if (this.data.markers || line.mean.length === 1) group.append(draw("circle", { cx: sx(x), cy: sy(y), r: 4.2 }));
      }
      if (line.mean.length > 1) {
        const mean = draw("path", { class: "mean", d: pathOf(line.mean, sx, sy), "stroke-dasharray": dash });
        group.prepend(mean);
      }
      return group;
    }

    hovering(view, lines, frame, sx, sy) {
      const { axes, svg, tip } = view;
      const xs = [...new Set(lines.flatMap((line) => (line.mean.length ? line.mean : line.seeds[0].points).map(([x]) => x)))].sort((a, b) => a - b);
      if (!xs.length) return;
      const cursor = draw("line", { class: "cursor", y1: frame.top, y2: frame.bottom, visibility: "hidden" });
      svg.append(cursor);
      const leave = () => { cursor.setAttribute("visibility", "hidden"); tip.hide(); };
      const show = (place) => {
        view.at = place;
        const x = xs[place];
        cursor.setAttribute("x1", sx(x));
        cursor.setAttribute("x2", sx(x));
        cursor.setAttribute("visibility", "visible");
        const rows = lines.flatMap((line) => {
          const points = line.mean.length ? line.mean : line.seeds[0].points;
          const found = points.find((point) => point[0] === x);
          if (!found) return [];
          const [, y, low, high] = found;
          const range = low !== null && low !== undefined ? ` [${exact(low)}, ${exact(high)}]` : "";
          return [{ name: line.name, colour: colour(line), value: y, text: exact(y) + range }];
        });
        rows.sort((a, b) => b.value - a.value);
        const middle = rows.length ? rows.reduce((sum, row) => sum + clamp(sy(row.value), frame.top, frame.bottom), 0) / rows.length : frame.top;
        const rules = (axes.rules ?? []).map((rule) => ({ name: rule.name, colour: "var(--ink)", text: exact(rule.value) }));
        const most = 14;
        const kept = rows.length > most ? [...rows.slice(0, most / 2), { name: "\u2026", colour: "transparent", text: "" }, ...rows.slice(-most / 2)] : rows;
        const ratio = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
        tip.show(sx(x) * ratio, middle * ratio, `${axes.x} ${axes.bytes ? bytes(x) : x.toLocaleString("en")}`, [...kept, ...rules]);
      };
      const nearest = (px) => xs.reduce((best, x, i) => (Math.abs(sx(x) - px) < Math.abs(sx(xs[best]) - px) ? i : best), 0);
      svg.addEventListener("pointermove", (event) => show(nearest(pointIn(svg, event)[0])));
      svg.addEventListener("pointerdown", (event) => show(nearest(pointIn(svg, event)[0])));
      svg.addEventListener("pointerleave", leave);
      svg.addEventListener("blur", leave);
      svg.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (event.key === "Escape") leave();
        if (!step) return;
        event.preventDefault();
        show(clamp(view.at < 0 ? (step > 0 ? 0 : xs.length - 1) : view.at + step, 0, xs.length - 1));
      });
    }
  }

  // ------------------------------------------------------------------------------------ dots, whiskers
  class Dots {
    constructor(holder, data) {
      this.data = data;
      this.node = make("div", { class: "panel" });
      holder.append(this.node);
      this.tip = tooltip(this.node);
    }

    render() {
      const { rows } = this.data;
      const width = Math.max(260, this.node.clientWidth || 640);
      const longest = Math.max(...rows.map((row) => row.name.length));
      const wide = width > 560;
      const label = Math.min(longest * 7.2 + 14, width * (wide ? 0.3 : 0.36));
      const frame = { left: label, right: width - (rows.some((row) => row.diverged) ? 92 : 16), top: 10, bottom: 10 + rows.length * 27 };
      const values = rows.flatMap((row) => [row.mean, row.low, row.high, ...row.seeds.map((seed) => seed.value)]).filter((v) => v !== null && v !== undefined);
      if (!values.length) return;
      const [low, high] = widened(Math.min(...values), Math.max(...values), false, 0.04);
      const sx = scale(low, high, false, frame.left, frame.right);
      const svg = draw("svg", { viewBox: `0 0 ${width} ${frame.bottom + 40}`, role: "img" });
      svg.setAttribute("aria-label", `${this.data.x} by cell; the same numbers stand in the table above`);
      if (this.svg) this.svg.replaceWith(svg); else this.node.prepend(svg);
      this.svg = svg;
      for (const x of linearTicks(low, high, Math.max(3, Math.floor((frame.right - frame.left) / 76)))) {
        svg.append(draw("line", { class: "grid", x1: sx(x), x2: sx(x), y1: frame.top, y2: frame.bottom }));
        svg.append(draw("text", { x: sx(x), y: frame.bottom + 17, "text-anchor": "middle" }, short(x)));
      }
      svg.append(draw("text", { x: (frame.left + frame.right) / 2, y: frame.bottom + 34, "text-anchor": "middle" }, this.data.x));
      if (this.data.rule !== null && this.data.rule !== undefined) {
        svg.append(draw("line", { class: "rule", x1: sx(this.data.rule), x2: sx(this.data.rule), y1: frame.top, y2: frame.bottom }));
      }
      rows.forEach((row, place) => svg.append(this.row(row, frame.top + 13.5 + place * 27, frame, sx, label)));
    }

    row(row, y, frame, sx, label) {
      const group = draw("g", { class: "series", style: `--colour:${colour(row)}`, "data-name": row.name });
      const letters = Math.floor((label - 10) / 6.6);
      const name = row.name.length > letters ? `${row.name.slice(0, letters - 1)}\u2026` : row.name;
      group.append(draw("rect", { x: 0, y: y - 13.5, width: frame.right, height: 27, fill: "transparent" }));
      group.append(draw("text", { class: "name", x: label - 10, y: y + 4, "text-anchor": "end" }, name));
      for (const seed of row.seeds) group.append(draw("line", { class: "tick", x1: sx(seed.value), x2: sx(seed.value), y1: y - 7, y2: y + 7 }));
      if (row.low !== null && row.low !== undefined) group.append(draw("path", { class: "mean", d: `M${sx(row.low)} ${y}H${sx(row.high)}` }));
      if (row.mean !== null && row.mean !== undefined) group.append(draw("circle", { cx: sx(row.mean), cy: y, r: 5 }));
      if (row.diverged) group.append(draw("text", { x: frame.right + 86, y: y + 4, "text-anchor": "end" }, `${row.diverged} diverged`));
      const show = () => {
        const rows = row.seeds.map((seed) => ({ name: `seed ${seed.seed}`, colour: colour(row), text: exact(seed.value) }));
        if (row.mean !== null && row.mean !== undefined) {
          const range = row.low !== null && row.low !== undefined ? ` [${exact(row.low)}, ${exact(row.high)}]` : "";
          rows.unshift({ name: "mean", colour: colour(row), text: exact(row.mean) + range });
        }
        const ratio = this.svg.getBoundingClientRect().width / this.svg.viewBox.baseVal.width;
        this.tip.show(sx(row.mean ?? frame.left) * ratio, y * ratio, `${row.name}: ${row.standing}`, rows);
      };
      group.addEventListener("pointerenter", show);
      group.addEventListener("pointerdown", show);
      group.addEventListener("pointerleave", () => this.tip.hide());
      return group;
    }
  }

  // ---------------------------------------------------------------------------------- all of the charts
  const drawn = [];
  for (const figure of document.querySelectorAll("figure.drawn")) {
    const data = JSON.parse(figure.querySelector(".chart-data").textContent);
    const holder = figure.querySelector(".chart");
    const chart = data.kind === "dots" ? new Dots(holder, data) : new Lines(holder, data);
    drawn.push({ chart, holder, width: 0 });
  }
  const fit = () => {
    for (const entry of drawn) {
      const width = entry.holder.clientWidth;
      if (width && width !== entry.width) { entry.width = width; entry.chart.render(); }
    }
  };
  fit();
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(document.querySelector("main"));
  addEventListener("beforeprint", () => document.querySelectorAll("details.trouble").forEach((node) => { node.open = true; }));
})();
