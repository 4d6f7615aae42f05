"use strict";
// Draws the plots, follows the theme, and shows what the reader picks. Colours "@name" are the CSS variables --name.
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isTouch = matchMedia("(pointer: coarse)").matches;

  const probe = document.getElementById("probe");
  const colours = new Map(); // of the present theme, as rgb(...)

  function colour(name) {
    if (!colours.has(name)) {
      probe.style.color = `var(--${name})`;
      colours.set(name, getComputedStyle(probe).color);
    }
    return colours.get(name);
  }

  function painted(value) {
    if (typeof value === "string") return /^@[a-z]+$/.test(value) ? colour(value.slice(1)) : value;
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map(painted) : value;
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, painted(part)]));
    }
    return value;
  }

  function axis(settings) {
    return {
      automargin: true, gridcolor: colour("grid"), zerolinecolor: colour("grid"), linecolor: colour("grid"),
      ...settings, title: { ...settings.title, standoff: 10 },
    };
  }

  function loadLibrary() {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotting").textContent;
    document.head.append(script);
  }

  const elementOf = (name) => document.querySelector(`[data-plot="${name}"]`);

  function tracesOf(name) {
    const picker = document.querySelector(`select[data-figure="${name}"]`);
    return plots[name].choices[picker ? Number(picker.value) : 0].traces;
  }

  // Where the page is narrow, legends have a line for each curve.
  function makeRoom(name) {
    const element = elementOf(name);
    const numLines = element.clientWidth < 500 ? Math.max(0, tracesOf(name).length - 3) : 0;
    element.style.minHeight = numLines ? `${19 + 1.3 * numLines}rem` : "";
  }

  function draw(name) {
    loadLibrary();
    const { layout } = plots[name];
    const traces = tracesOf(name);
    const full = {
      ...layout,
      xaxis: axis(layout.xaxis),
      yaxis: axis(layout.yaxis),
      font: { family: "system-ui, sans-serif", size: 13, color: colour("text") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 56, r: 12, t: 8, b: 48 },
      legend: { orientation: "h", yanchor: "bottom", y: 1.02, xanchor: "left", x: 0 },
      hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("grid"), font: { color: colour("text") } },
      uniformtext: { minsize: 9, mode: "hide" },
      showlegend: traces.length > 1,
      hovermode: "closest",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("off"), activecolor: colour("das") },
      dragmode: isTouch ? false : "zoom",
    };
    const config = {
      responsive: true, displaylogo: false, displayModeBar: !isTouch, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    };
    makeRoom(name);
    Plotly.react(elementOf(name), painted(traces), full, config);
    due.delete(name);
  }

  // Figures are drawn one at a time, so that the page answers in between: each time the one nearest to what is on the screen.
  const names = Object.keys(plots);
  const due = new Set();

  function distance(name) {
    const { top, bottom } = elementOf(name).getBoundingClientRect();
    return Math.max(top - innerHeight, -bottom, 0);
  }

  function drawNext() {
    const [nearest] = [...due].map((name) => ({ name, away: distance(name) })).sort((a, b) => a.away - b.away);
    if (nearest) draw(nearest.name);
    if (due.size) drawSoon();
    else root.dataset.drawn = "all";
  }

  let waiting;
  function drawSoon() {
    clearTimeout(waiting);
    waiting = setTimeout(drawNext, 0);
  }

  function drawAnew() {
    colours.clear();
    names.forEach((name) => due.add(name));
    delete root.dataset.drawn;
    drawSoon();
  }

  function showTheme() {
    const chosen = root.dataset.theme;
    const isDark = chosen ? chosen === "dark" : prefersDark.matches;
    button.textContent = isDark ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(isDark));
    button.setAttribute("aria-label", `Switch to ${isDark ? "light" : "dark"} colours`);
    return isDark;
  }

  button.addEventListener("click", () => {
    root.dataset.theme = showTheme() ? "light" : "dark";
    showTheme();
    drawAnew();
  });
  prefersDark.addEventListener("change", () => {
    showTheme();
    drawAnew();
  });
  document.querySelectorAll("select[data-figure]").forEach((picker) =>
    picker.addEventListener("change", () => draw(picker.dataset.figure)));
  document.querySelectorAll("select[data-picks]").forEach((picker) =>
    picker.addEventListener("change", () =>
      document.querySelectorAll(`[data-${picker.dataset.picks}]`).forEach((part) => {
        part.hidden = part.dataset[picker.dataset.picks] !== picker.value;
      })));
  document.querySelectorAll("input[data-shows]").forEach((box) =>
    box.addEventListener("change", () => document.body.classList.toggle(`shows-${box.dataset.shows}`, box.checked)));

  // Paper is white, and it does not wait: what is not drawn by then is missing on it.
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    colours.clear();
    names.forEach(draw);
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    drawAnew();
  });

  // The library takes the longest, so the text is there, with room for the figures, before it starts.
  showTheme();
  names.forEach(makeRoom);
  addEventListener("load", drawAnew);
})();
