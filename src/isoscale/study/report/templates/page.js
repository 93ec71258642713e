// Values under the pointer, and a page that opens as its address says: report.html#time, #log or #time,log.
"use strict";

// Where the axes of a chart end; charts.py draws them there.
const LEFT = 56, RIGHT = 468, TOP = 10, BOTTOM = 236;

function choose() {
  const words = location.hash.slice(1).split(",");
  for (const name of ["step", "time"]) {
    const choice = document.getElementById("by-" + name);
    if (choice && words.includes(name)) choice.checked = true;
  }
  for (const box of document.querySelectorAll(".log")) {
    if (words.includes("log")) box.checked = true;
    if (words.includes("linear")) box.checked = false;
  }
}

function nearest(points, x) {
  let found = 0;
  for (let i = 1; i < points.length; i++) {
    if (Math.abs(points[i] - x) < Math.abs(points[found] - x)) found = i;
  }
  return found;
}

function seconds(value) {
  if (value < 60) return value.toPrecision(3) + " s";
  const whole = Math.round(value), pad = (number) => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return (hours ? hours + ":" + pad(minutes) : minutes) + ":" + pad(whole % 60);
}

function follow(drawing, lines, readout) {
  const by = drawing.dataset.by, words = readout.textContent;
  const curves = lines.map((line) => line[by].map((value) => LEFT + value / drawing.dataset.end * (RIGHT - LEFT)));
  const cursor = document.createElementNS(drawing.namespaceURI, "path");
  cursor.setAttribute("class", "cursor");
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * drawing.viewBox.baseVal.width;
    const indices = curves.map((points) => nearest(points, x));
    const distance = (k) => Math.abs(curves[k][indices[k]] - x);
    const first = indices.map((_, k) => k).reduce((best, k) => distance(k) < distance(best) ? k : best, 0);
    const at = curves[first][indices[first]], value = lines[first][by][indices[first]];
    cursor.setAttribute("d", `M${at} ${TOP}V${BOTTOM}`);
    drawing.append(cursor);
    // Curves are logged at steps of their own: only those with a point here have something to say.
    const here = lines.filter((_, k) => Math.abs(curves[k][indices[k]] - at) < 1);
    const texts = here.map((line) => line.name + " " + line.value[indices[lines.indexOf(line)]]);
    readout.textContent = [by === "step" ? "step " + value : seconds(value), ...texts].join(" · ");
  });
  drawing.addEventListener("pointerleave", () => { cursor.remove(); readout.textContent = words; });
}

for (const figure of document.querySelectorAll(".chart")) {
  const lines = JSON.parse(figure.querySelector("script").textContent);
  const readout = figure.querySelector(".readout");
  if (lines.length) for (const drawing of figure.querySelectorAll("svg[data-by]")) follow(drawing, lines, readout);
}
addEventListener("beforeprint", () => { for (const folded of document.querySelectorAll("details")) folded.open = true; });
addEventListener("hashchange", choose);
choose();
