"use strict";
(() => {
  // ---------------------------------------------------------------------------------------- the theme
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const nameTheme = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
    button.setAttribute("aria-pressed", String(isDark()));
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("maclaurin-theme", root.dataset.theme); } catch { /* private windows */ }
    nameTheme();
  });
  prefersDark.addEventListener("change", nameTheme);
  nameTheme();

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
        const text = cell.textContent.trim();
        return [infinity(cell.dataset.value ?? (text === "\u2013" ? "" : text)), row];
      });
      rows.sort(([a], [b]) => (a === "" || b === "" ? (a === "") - (b === "") : (up ? 1 : -1) * compare(a, b)));
      body.append(...rows.map(([, row]) => row));
    }));
  }

  // --------------------------------------------------------------------------------------- the charts
  // Colours are the page's own variables, so a chart follows the theme, and print, without being drawn again.
  const config = JSON.parse(document.getElementById("chart-config").textContent);
  config.font = getComputedStyle(root).getPropertyValue("--sans").trim();
  const drawings = [...document.querySelectorAll("figure.drawn")].map((figure) => {
    const spec = JSON.parse(figure.querySelector("script.spec").textContent);
    const holder = figure.querySelector(".chart");
    return vegaEmbed(holder, spec, { renderer: "svg", actions: false, config, tooltip: { theme: "custom" } });
  });
  Promise.all(drawings).then(() => { root.dataset.drawn = "true"; });
})();
