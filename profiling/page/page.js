// The timeline: drawing, zoom, pan, hover. The tables of the page do not need it.
"use strict";
(() => {
const data = JSON.parse(document.getElementById("timeline-data").textContent);
const box = document.getElementById("timeline");
const canvas = document.getElementById("lanes");
const overview = document.getElementById("overview");
const tip = document.getElementById("tip");
const spoken = document.getElementById("spoken");
const LANE = 26, GAP = 6, HEAD = 30, AXIS = 24, SHORTEST = 50; // pixels; nanoseconds
const view = { from: 0, to: data.length };
let colours = {}, rows = [], labels = 0, hovered = null;

// Layout: a heading per rank, a lane per row. On narrow screens a lane's name stands above it.
const narrow = () => box.clientWidth < 640;
const width = () => canvas.clientWidth;
const scale = () => (width() - labels) / (view.to - view.from);
const x = (time) => labels + (time - view.from) * scale();
const time = (px) => view.from + (px - labels) / scale();

function layout() {
  labels = narrow() ? 0 : 128;
  let y = AXIS, rank = null;
  rows = data.rows.map((row) => {
    const heading = row.rank + row.place !== rank;
    rank = row.rank + row.place;
    y += (heading ? HEAD : 0) + (narrow() ? 16 : 0);
    const placed = { ...row, y, heading, reach: row.reach || reach(row) };
    y += LANE + GAP;
    return placed;
  });
  canvas.style.height = `${y + 4}px`;
  for (const each of [canvas, overview]) {
    each.width = each.clientWidth * devicePixelRatio;
    each.height = each.clientHeight * devicePixelRatio;
    each.getContext("2d").setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  }
}

// The latest end of any slice up to each: what tells where a search from the left may stop.
function reach(row) {
  let latest = -Infinity;
  return row.start.map((start, i) => (latest = Math.max(latest, start + row.length[i])));
}

function firstAfter(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

function readColours() {
  const probe = document.createElement("i");
  box.append(probe);
  const resolve = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  colours.paints = data.paints.map(([key]) => resolve(key));
  for (const name of ["text", "soft", "line", "track", "card", "exposed", "wait", "link"])
    colours[name] = resolve(name);
  probe.remove();
  colours.ink = colours.paints.map((rgb) => {
    const [r, g, b] = rgb.match(/[\d.]+/g).map((part) => (part / 255) ** 2.2);
    return 0.21 * r + 0.72 * g + 0.07 * b > 0.18 ? "#10151b" : "#fff";
  });
  colours.hatch = hatch(colours.exposed, 7, 1.8);
  colours.dots = hatch(colours.wait, 7, 1);
}

function hatch(colour, step, line) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = step * 2;
  const c = tile.getContext("2d");
  c.strokeStyle = colour;
  c.lineWidth = line;
  for (let offset = -2 * step; offset <= 2 * step; offset += step) {
    c.moveTo(offset, 2 * step);
    c.lineTo(offset + 2 * step, 0);
  }
  c.stroke();
  return canvas.getContext("2d").createPattern(tile, "repeat");
}

function draw() {
  const c = canvas.getContext("2d");
  c.clearRect(0, 0, width(), canvas.clientHeight);
  c.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  c.textBaseline = "middle";
  axis(c);
  for (const row of rows) {
    if (row.heading) heading(c, row);
    lane(c, row);
  }
  boundaries(c);
  if (hovered) highlight(c);
  drawOverview();
}

function axis(c) {
  const wanted = (view.to - view.from) / Math.max(2, (width() - labels) / (narrow() ? 72 : 110));
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
  c.fillStyle = colours.soft;
  c.textAlign = "center";
  for (let tick = Math.ceil(view.from / step) * step; tick <= view.to; tick += step) {
    const at = x(tick);
    c.fillStyle = colours.line;
    c.fillRect(at, AXIS - 6, 1, canvas.clientHeight);
    c.fillStyle = colours.soft;
    if (at - labels > 24 && at < width() - 24) c.fillText(shown(tick, step), at, 9);
  }
}

function heading(c, row) {
  const y = row.y - (narrow() ? 16 : 0) - HEAD / 2 + 2;
  c.textAlign = "left";
  c.fillStyle = colours.text;
  c.font = c.font.replace("12px", "600 12px");
  c.fillText(`${row.rank} · ${row.place}`, 0, y);
  c.font = c.font.replace("600 ", "");
}

function lane(c, row) {
  c.fillStyle = colours.track;
  c.fillRect(labels, row.y, width() - labels, LANE);
  c.save();
  c.beginPath();
  c.rect(labels, row.y - GAP, width() - labels, LANE + GAP);
  c.clip();
  const named = [];
  let painted = -1; // the pixel that the last short slice coloured
  for (let i = firstAfter(row.reach, view.from); i < row.start.length; i++) {
    if (row.start[i] > view.to) break;
    const left = x(row.start[i]), wide = row.length[i] * scale();
    if (wide < 1 && Math.floor(left) === painted) continue;
    if (wide < 1) painted = Math.floor(left);
    slice(c, row, i, left, Math.max(wide, 0.75));
    if (wide > 50) named.push(i);
  }
  for (const [start, end] of row.exposed) {
    if (end < view.from || start > view.to) continue;
    const left = x(start), wide = (end - start) * scale();
    c.fillStyle = colours.hatch;
    if (wide > 2) c.fillRect(left, row.y, wide, LANE);
    c.fillStyle = colours.exposed;
    c.fillRect(left, row.y + LANE - 4, wide, 4); // a short one is as faint as it is short
  }
  for (const i of named) caption(c, row, i);
  c.restore();
  c.textAlign = "left";
  c.fillStyle = colours.soft;
  const y = narrow() ? row.y - 8 : row.y + LANE / 2;
  c.fillText(fitted(c, row.title, narrow() ? width() : labels - 10), 0, y);
}

function slice(c, row, i, left, wide) {
  const paint = row.paint[i];
  if (data.paints[paint][0] === "wait") {
    c.fillStyle = colours.dots;
    c.fillRect(left, row.y + 5, wide, LANE - 10);
    c.strokeStyle = colours.wait;
    if (wide > 3) c.strokeRect(left + 0.5, row.y + 5.5, wide - 1, LANE - 11);
  } else {
    c.fillStyle = colours.paints[paint];
    c.fillRect(left, row.y, wide > 4 ? wide - 0.75 : wide, LANE);
  }
}

// A slice's name, on a ground of its paint, so that hatching does not run through it.
function caption(c, row, i) {
  const paint = row.paint[i], from = Math.max(x(row.start[i]), labels) + 5;
  const room = Math.min(x(row.start[i] + row.length[i]), width()) - from - 5;
  let text = called(row, i);
  if (c.measureText(text).width > room)
    text = row.layer[i] < 0 ? fitted(c, text, room) : data.paints[paint][1];
  if (text.length < 8 || c.measureText(text).width > room) return;
  const waits = data.paints[paint][0] === "wait";
  c.lineWidth = 4;
  c.lineJoin = "round";
  c.strokeStyle = waits ? colours.track : colours.paints[paint];
  c.strokeText(text, from, row.y + LANE / 2);
  c.lineWidth = 1;
  c.fillStyle = waits ? colours.text : colours.ink[paint];
  c.fillText(text, from, row.y + LANE / 2);
}

function called(row, i) {
  const layer = row.layer[i] < 0 ? "" : data.layers[row.layer[i]];
  if (layer) return `${data.paints[row.paint[i]][1]} · ${layer}`;
  if (row.count[i] > 1) return `${row.count[i]} short events`;
  return row.name[i] < 0 ? data.paints[row.paint[i]][1] : data.names[row.name[i]];
}

function fitted(c, text, room) {
  if (c.measureText(text).width <= room) return text;
  let keep = Math.floor((text.length * room) / c.measureText(text).width) - 1;
  while (keep > 0 && c.measureText(`${text.slice(0, keep)}…`).width > room) keep--;
  return keep > 0 ? `${text.slice(0, keep)}…` : "";
}

// Iterations of a rank: a line at each begin, its name in the rank's heading.
function boundaries(c) {
  for (const head of rows.filter((row) => row.heading)) {
    const own = rows.filter((row) => row.rank === head.rank && row.place === head.place);
    const top = head.y - (narrow() ? 16 : 0) - HEAD + 4, bottom = own.at(-1).y + LANE;
    for (const { rank, name, start, end } of data.iterations) {
      if (rank !== head.rank || end < view.from || start > view.to) continue;
      c.fillStyle = colours.soft;
      if (start >= view.from) c.fillRect(x(start) - 0.5, top, 1, bottom - top);
      const from = Math.max(x(start), labels + (narrow() ? 96 : 0)) + 6;
      const room = Math.min(x(end), width()) - from;
      c.textAlign = "left";
      c.fillText(fitted(c, `iteration ${name}`, room), from, head.y - (narrow() ? 16 : 0) - HEAD / 2 + 2);
    }
  }
}

// The slice under the pointer; for a collective also a line from its issue to its begin.
function highlight(c) {
  const { row, i } = hovered;
  const left = Math.max(x(row.start[i]), labels), right = x(row.start[i] + row.length[i]);
  c.strokeStyle = colours.text;
  c.lineWidth = 2;
  c.strokeRect(left, row.y, Math.max(2, Math.min(right, width()) - left), LANE);
  c.lineWidth = 1;
  const one = data.collectives[row.collective[i]];
  if (!one || one.issue === null || x(one.start) < labels) return;
  const issued = Math.max(x(one.issue), labels), y = row.y - GAP / 2;
  c.beginPath();
  c.moveTo(issued, y);
  c.lineTo(x(one.start), y);
  c.stroke();
  c.fillStyle = colours.text;
  c.fillRect(issued - 2, y - 3, 4, 6);
}

function drawOverview() {
  const c = overview.getContext("2d"), w = overview.clientWidth, h = overview.clientHeight;
  c.clearRect(0, 0, w, h);
  c.fillStyle = colours.track;
  c.fillRect(0, 0, w, h);
  const each = h / rows.length, per = w / data.length;
  rows.forEach((row, n) => {
    let painted = -1;
    row.start.forEach((start, i) => {
      const left = start * per, wide = row.length[i] * per;
      if (wide < 1 && Math.floor(left) === painted) return;
      painted = Math.floor(left);
      c.fillStyle = colours.paints[row.paint[i]];
      c.fillRect(left, n * each, Math.max(wide, 0.5), each);
    });
    c.fillStyle = colours.exposed;
    for (const [start, end] of row.exposed)
      c.fillRect(start * per, (n + 0.5) * each, (end - start) * per, each / 2);
  });
  c.fillStyle = colours.card;
  c.globalAlpha = 0.65;
  c.fillRect(0, 0, view.from * per, h);
  c.fillRect(view.to * per, 0, w, h);
  c.globalAlpha = 1;
  c.strokeStyle = colours.link;
  c.lineWidth = 2;
  c.strokeRect(view.from * per + 1, 1, Math.max(2, (view.to - view.from) * per - 2), h - 2);
  c.lineWidth = 1;
}

// Times

function shown(nanoseconds, step) {
  const [unit, size] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]].find(
    ([, each]) => Math.max(Math.abs(nanoseconds), step) >= each) || ["ns", 1];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  return `${(nanoseconds / size).toFixed(digits)} ${unit}`;
}
const exact = (nanoseconds) => shown(nanoseconds, Math.max(1, 10 ** (Math.floor(Math.log10(Math.abs(nanoseconds) || 1)) - 3)));
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");

// Tooltip

function facts(row, i) {
  const lines = [["begins at", exact(row.start[i])], ["lasts", exact(row.length[i])]];
  const during = data.iterations.find(({ rank, start, end }) =>
    rank === row.rank && start <= row.start[i] && row.start[i] < end);
  if (during) lines.unshift(["iteration", during.name]);
  const one = data.collectives[row.collective[i]];
  if (!one) return lines;
  if (one.issue !== null) lines.push(["issued before", exact(one.start - one.issue)]);
  lines.push(["transfer", exact(one.transfer)]);
  for (const [stage, length] of one.under)
    lines.push([`under ${stage}`, percent(length, one.transfer)]);
  if (one.beside) lines.push(["under other compute", percent(one.beside, one.transfer)]);
  lines.push(["exposed", percent(one.exposed, one.transfer)]);
  if (one.late) lines.push(["waited for a late rank", exact(one.late)]);
  if (one.wait) lines.push(["compute waited for it", exact(one.wait)]);
  if (one.inferred) lines.push(["its name is", "inferred"]);
  return lines;
}

function say(target, px, py) {
  hovered = target;
  tip.hidden = !target;
  if (target) {
    const { row, i } = target, name = row.name[i] < 0 ? "" : data.names[row.name[i]];
    const title = document.createElement("strong"), list = document.createElement("dl");
    title.textContent = called(row, i);
    for (const [term, text] of facts(row, i))
      for (const [tag, content] of [["dt", term], ["dd", text]])
        list.append(Object.assign(document.createElement(tag), { textContent: content }));
    tip.replaceChildren(title, list);
    if (name && name !== title.textContent)
      title.after(Object.assign(document.createElement("div"), { textContent: name, className: "soft" }));
    const wide = tip.offsetWidth, room = box.clientWidth;
    tip.style.left = `${Math.max(8, Math.min(px + 14, room - wide - 8))}px`;
    const below = box.getBoundingClientRect().top + py + 18 + tip.offsetHeight < innerHeight;
    tip.style.top = `${below ? py + 18 : py - tip.offsetHeight - 12}px`;
  }
  draw();
}

function under(px, py) {
  const row = rows.find((each) => py >= each.y && py < each.y + LANE);
  if (!row || px < labels) return null;
  const slack = 3 / scale(), at = time(px);
  for (let i = firstAfter(row.start, at + slack) - 1; i >= 0 && row.reach[i] >= at - slack; i--)
    if (row.start[i] + row.length[i] >= at - slack) return { row, i };
  return null;
}

// Zoom and pan

function show(from, to) {
  const length = Math.min(data.length, Math.max(SHORTEST, to - from));
  view.from = Math.max(0, Math.min(from, data.length - length));
  view.to = view.from + length;
  hovered = null; // what was under the pointer has moved
  tip.hidden = true;
  draw();
}
function zoom(factor, at = (view.from + view.to) / 2) {
  show(at - (at - view.from) * factor, at + (view.to - at) * factor);
}
const pan = (share) => {
  const by = (view.to - view.from) * share;
  show(view.from + by, view.to + by);
};

// Longest exposed parts, in order of time: what the arrow buttons go to.
const exposed = data.rows.flatMap((row, n) => row.exposed.map(([start, end]) => ({ n, start, end })))
  .sort((a, b) => b.end - b.start - (a.end - a.start)).slice(0, 100).sort((a, b) => a.start - b.start);
let current = -1;
function step(by) {
  if (!exposed.length) return;
  current = (current + by + exposed.length + (current < 0 && by < 0 ? 1 : 0)) % exposed.length;
  const { n, start, end } = exposed[current], row = rows[n], middle = (start + end) / 2;
  show(start - 3 * (end - start), end + 3 * (end - start));
  say(under(x(middle), row.y + 1), canvas.offsetLeft + x(middle), canvas.offsetTop + row.y);
  spoken.textContent = `exposed part ${current + 1} of ${exposed.length}: ${exact(end - start)}, `
    + `${row.rank} ${row.title}. ${tip.innerText.replaceAll("\n", ", ")}`;
}

const actions = {
  "zoom-in": () => zoom(0.5), "zoom-out": () => zoom(2), reset: () => show(0, data.length),
  previous: () => step(-1), next: () => step(1), left: () => pan(-0.2), right: () => pan(0.2),
};
const keys = { "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", 0: "reset", p: "previous", n: "next",
  ArrowLeft: "left", ArrowRight: "right" };
for (const button of document.querySelectorAll("button[data-action]"))
  button.addEventListener("click", () => actions[button.dataset.action]());
canvas.addEventListener("keydown", (event) => {
  if (event.key === "Escape") say(null);
  if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
  actions[keys[event.key]]();
  event.preventDefault();
});
canvas.addEventListener("wheel", (event) => {
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / width());
  else if (event.ctrlKey || event.metaKey || document.activeElement === canvas)
    zoom(1.0015 ** event.deltaY, time(event.offsetX));
  else return; // the page scrolls
  event.preventDefault();
}, { passive: false });

// One pointer pans, two pinch; a short press is a tap, which shows what a mouse shows by hovering.
const pointers = new Map();
let moved = 0;
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, event.offsetX);
  moved = 0;
});
canvas.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  if (before === undefined) return point(event);
  const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
  pointers.set(event.pointerId, event.offsetX);
  moved += Math.abs(event.offsetX - before);
  if (moved < 4) return;
  canvas.classList.add("dragging");
  if (other === undefined) pan((before - event.offsetX) / (width() - labels));
  else zoom(Math.abs(before - other + 0.01) / Math.max(8, Math.abs(event.offsetX - other)), time(other));
});
const point = (event) => say(under(event.offsetX, event.offsetY),
  canvas.offsetLeft + event.offsetX, canvas.offsetTop + event.offsetY);
for (const kind of ["pointerup", "pointercancel"])
  canvas.addEventListener(kind, (event) => {
    pointers.delete(event.pointerId);
    canvas.classList.remove("dragging");
    if (kind === "pointerup" && moved < 4) point(event);
  });
canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && say(null));
const jump = (event) => {
  if (!event.buttons) return;
  const half = (view.to - view.from) / 2, at = (event.offsetX / overview.clientWidth) * data.length;
  show(at - half, at + half);
};
overview.addEventListener("pointerdown", jump);
overview.addEventListener("pointermove", jump);

// Theme: the system's, until the button is used.
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = document.getElementById("theme");
const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
function repaint() {
  theme.textContent = isDark() ? "Light" : "Dark";
  if (!rows.length && !data.rows.length) return;
  layout();
  readColours();
  draw();
}
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  repaint();
});
dark.addEventListener("change", repaint);
addEventListener("resize", repaint);
repaint();
})();
