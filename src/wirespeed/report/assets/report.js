// Draws the figures held in the page's JSON with the page's own colours, again when light turns dark or to paper.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const PRINT_WIDTH_PX = 660;

  const tokens = () => {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    return { ink: read("--ink"), paper: read("--paper"), grid: read("--grid"), soft: read("--soft") };
  };

  const LIGHT = { ink: "#000000", paper: "#ffffff", grid: "#dddddd", soft: "#444444" };

  // Figures name the colours "ink" and "paper"; the page says what they are.
  const coloured = (value, colours) => {
    if (Array.isArray(value)) return value.map((part) => coloured(part, colours));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, part]) =>
        [key, /color$/.test(key) && typeof part === "string" && part in colours
          ? colours[part] : coloured(part, colours)]));
    }
    return value;
  };

  const axis = (given, colours) => ({
    gridcolor: colours.grid, linecolor: colours.grid, zerolinecolor: colours.grid,
    tickfont: { color: colours.ink }, ...given,
    title: { standoff: 10, font: { color: colours.soft, size: 13 }, ...(given && given.title) },
  });

  const draw = (colours, widthPx) => {
    const family = getComputedStyle(document.body).fontFamily;
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = coloured(figure, colours);
      const wanted = {
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family, size: 13, color: colours.ink },
        hoverlabel: { font: { family, size: 13 } },
        ...layout,
        margin: { l: 10, r: 16, t: 16, b: 44, ...layout.margin },
        xaxis: axis(layout.xaxis, colours),
        yaxis: axis(layout.yaxis, colours),
      };
      if (widthPx !== null) wanted.width = widthPx;
      Plotly.react(id, data, wanted, { responsive: widthPx === null, displayModeBar: false });
    }
  };

  const drawForScreen = () => draw(tokens(), null);
  drawForScreen();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawForScreen);
  window.addEventListener("beforeprint", () => draw(LIGHT, PRINT_WIDTH_PX));
  window.addEventListener("afterprint", drawForScreen);
  document.documentElement.dataset.drawn = String(Object.keys(figures).length);
})();
