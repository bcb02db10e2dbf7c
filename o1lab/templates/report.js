// Draws each figure when it comes near the screen; until then, in print and without scripts, its picture stands there.
"use strict";

const NARROW = 620; // px; below it the lines' names become a legend and the title becomes text

function adapt(figure, width) {
  const layout = structuredClone(figure.layout);
  layout.autosize = true;
  delete layout.width;
  layout.height = layout.height || 520;
  let title = "";
  if (width < NARROW) {
    title = ((layout.title && layout.title.text) || "").replace(/<[^>]*>/g, " ");
    layout.title = { text: "" };
    layout.height = 400;
    const names = new Set(figure.data.map((trace) => trace.name));
    layout.annotations = (layout.annotations || []).filter((note) => !names.has((note.text || "").replace(/<[^>]*>/g, "")));
    layout.margin = { l: 56, r: 12, t: 12, b: 60 };
    layout.showlegend = true;
    layout.legend = { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 12 } };
    layout.font = { ...(layout.font || {}), size: 12 };
  }
  return { layout, title };
}

function draw(box) {
  const target = box.querySelector(".drawing");
  const figure = JSON.parse(box.querySelector("script").textContent);
  const { layout, title } = adapt(figure, box.clientWidth);
  const heading = box.querySelector(".figure-title");
  heading.textContent = title;
  heading.hidden = !title;
  target.hidden = false;
  box.classList.add("drawn");
  Plotly.react(target, figure.data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
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
