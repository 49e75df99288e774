"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

  // Charts in the colours of the page.
  const drawCharts = () => {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = { labelColor: colour("quiet"), titleColor: colour("ink"), gridColor: colour("line"), domainColor: colour("line"), tickColor: colour("line") };
    const config = {
      background: "transparent",
      font: getComputedStyle(document.body).fontFamily,
      axis,
      legend: { labelColor: colour("quiet"), titleColor: colour("ink") },
      title: { color: colour("ink"), anchor: "start" },
      text: { color: colour("ink") },
      rule: { color: colour("ink") },
      view: { stroke: null },
      range: { category: [0, 1, 2, 3, 4, 5, 6].map((place) => colour(`c${place}`)) },
      scale: { invalid: { color: { value: colour("c1") } } }, // in place of what is no number
    };
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const spec = JSON.parse(figure.querySelector("script").textContent);
      vegaEmbed(figure.querySelector(".chart"), spec, { actions: false, renderer: "svg", config, tooltip: { disableDefaultStyle: true } })
        .then(() => { figure.dataset.chart = "drawn"; });
    }
  };
  const showTheme = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
    drawCharts();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("maclaurin-theme", root.dataset.theme); } catch { /* private windows */ }
    showTheme();
  });
  prefersDark.addEventListener("change", showTheme);
  showTheme();

  // Tables that sort by their headings.
  for (const table of document.querySelectorAll("table.sortable")) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, place) => heading.querySelector("button").addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => { const text = row.cells[place].dataset.value; return text === "" ? Infinity : Number(text); };
      const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? -1 : 1) * (value(a) - value(b)));
      table.tBodies[0].append(...rows);
    }));
  }
})();
