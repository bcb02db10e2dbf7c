// Draws each figure when it comes near the screen; until then, in print and without scripts, its picture stands there.
"use strict";

const NARROW = 620; // px; below it the lines' names move from their ends into a legend

function adapt(figure, width) {
  const layout = { ...structuredClone(figure.layout), autosize: true };
  delete layout.width;
  if (width >= NARROW) return { data: figure.data, layout };
  const text = (words) => (words || "").replace(/<[^>]*>/g, " ").replace(/\s+/g, " ").trim();
  const names = new Set(figure.data.map((trace) => text(trace.name)));
  const named = new Set();
  layout.annotations = (layout.annotations || []).filter((note) => {
    const isName = names.has(text(note.text));
    if (isName) named.add(text(note.text));
    return !isName;
  });
  const data = figure.data.map((trace) => (named.has(text(trace.name)) ? { ...trace, showlegend: true } : trace));
  layout.showlegend = layout.showlegend || named.size > 0;
  layout.legend = { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 13 } };
  layout.margin = { l: 56, r: 12, t: 12, b: 60 };
  layout.font = { ...(layout.font || {}), size: 13 };
  return { data, layout };
}

function draw(box) {
  const target = box.querySelector(".drawing");
  const { data, layout } = adapt(JSON.parse(box.querySelector("script").textContent), box.clientWidth);
  target.hidden = false;
  box.classList.add("drawn");
  Plotly.react(target, data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
}

function unfold() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") target.open = true;
}

unfold(); // at once: this script comes before plotly's large one, which only the figures wait for
window.addEventListener("hashchange", unfold);
document.addEventListener("DOMContentLoaded", () => {
  const boxes = [...document.querySelectorAll("figure.plot")].filter((box) => box.querySelector("script"));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((entry) => entry.isIntersecting)) {
        seen.unobserve(entry.target);
        draw(entry.target);
      }
    },
    { rootMargin: "400px" },
  );
  boxes.forEach((box) => seen.observe(box));
  window.matchMedia(`(max-width: ${NARROW}px)`).addEventListener("change", () => {
    boxes.filter((box) => box.classList.contains("drawn")).forEach(draw);
  });
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details[data-print]").forEach((fold) => (fold.open = true));
    boxes.filter((box) => !box.classList.contains("drawn") && !box.querySelector("img")).forEach(draw);
  });
});
