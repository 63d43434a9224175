// Attention maps. Numbers are unpacked a layer at a time, and those in view are drawn first.
const about = JSON.parse(document.getElementById("maps").textContent), { tokens, segments, visible, layers, heads } = about;
const T = tokens.length, at = id => document.getElementById(id), controls = at("controls");
const few = matchMedia("(prefers-color-scheme: dark)"), letter = i => "abcdefghijklmnopqrstuvwxyz"[i] ?? "";

// Codes to numbers.
const half = () => Float32Array.from({ length: 65536 }, (_, code) => {
  const exponent = (code >> 10) & 31, part = code & 1023, size = exponent ? (exponent === 31 ? (part ? NaN : Infinity) : 2 ** (exponent - 15) * (1 + part / 1024)) : part * 2 ** -24;
  return code >> 15 ? -size : size;
});
const halves = half();

async function codes(id) {
  const text = atob(at(id).textContent), raw = new Uint8Array(text.length);
  for (let i = 0; i < raw.length; i++) raw[i] = text.charCodeAt(i);
  const buffer = await new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  return new Uint16Array(buffer);
}
const kept = new Map(), KEEP = T > 512 ? 3 : 64;
function unpacked(layer) {
  const found = kept.get(layer) ?? (async () => {
    const sides = await Promise.all(about.sides.map(async (_, side) => ({ w: await codes(`w${side}-${layer}`), e: await codes(`e${side}-${layer}`) })));
    sides.slice(1).forEach(side => { for (let i = 0; i < side.w.length; i++) side.w[i] ^= sides[0].w[i]; });
    return sides;
  })();
  kept.delete(layer); kept.set(layer, found);
  if (kept.size > KEEP) kept.delete(kept.keys().next().value);
  return found;
}
// What a view shows: a function of the place in a layer.
function values(sides, view) {
  if (view === "d") { const [one, other] = pair().map(side => sides[side].e); return i => (halves[one[i]] - halves[other[i]]) / Math.SQRT2; }
  const codes = sides[+view.slice(1)][view[0]];
  return i => halves[codes[i]];
}
const pair = () => [+(at("one")?.value ?? 0), +(at("other")?.value ?? 1)];
const nameOf = view => view === "d" ? `${about.sides[pair()[0]]} − ${about.sides[pair()[1]]}` : `${view[0] === "w" ? "weights of" : "error of"} ${about.sides[+view.slice(1)]}`;

// Colours, which are the page's.
let colour;
function colours() {
  // A page drawn in dark colours is printed on white paper all the same.
  document.body.classList.toggle("dark", few.matches);
  const style = getComputedStyle(document.documentElement), rgb = name => { const hex = style.getPropertyValue(name).trim().slice(1); return [0, 2, 4].map(i => parseInt(hex.slice(i, i + 2), 16)); };
  const word = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0, between = (a, b, share) => a.map((from, i) => Math.round(from + (b[i] - from) * share));
  const stops = ["--w0", "--w1", "--w2", "--w3"].map(rgb), ramp = Uint32Array.from({ length: 256 }, (_, i) => { const place = i / 255 * 3, low = Math.min(2, Math.floor(place)); return word(between(stops[low], stops[low + 1], place - low)); });
  const zero = rgb("--zero"), sides = { "-1": [rgb("--minus"), rgb("--minus-over")], 1: [rgb("--plus"), rgb("--plus-over")] };
  // Up to a tolerance faint; beyond it strong at once, and stronger up to a hundred.
  const error = value => { const size = Math.abs(value), [within, over] = sides[value < 0 ? -1 : 1]; return word(size > 1 ? between(within, over, Math.min(1, Math.log10(size) / 2)) : between(zero, within, 0.5 * Math.sqrt(size))); };
  const table = Uint32Array.from({ length: 401 }, (_, i) => error((i - 200) / 200));
  const fast = value => value > 1 || value < -1 ? error(value) : table[Math.round(value * 200) + 200];
  const css = name => style.getPropertyValue(name).trim();
  colour = { ramp, error: fast, mask: word(rgb("--mask")), none: word(rgb("--hole")), css, hatch: null };
  const tile = document.createElement("canvas"), ink = (tile.width = tile.height = 6, tile.getContext("2d"));
  ink.strokeStyle = css("--mask-line"); ink.lineWidth = 1; ink.beginPath();
  for (const shift of [-6, 0, 6]) { ink.moveTo(shift, 6); ink.lineTo(shift + 6, 0); }
  ink.stroke(); colour.hatch = ink.createPattern(tile, "repeat");
}
let rooted = false;
const paint = (view, value, masked, top) => {
  if (masked && (view[0] !== "w" || !(value > about.leak))) return colour.mask;
  if (Number.isNaN(value) || (view[0] === "w" && !(value >= 0 && value <= 1.01))) return colour.none;
  return view[0] === "w" ? colour.ramp[Math.min(255, Math.round(255 * (rooted ? Math.sqrt(value / top) : value / top)))] : colour.error(value);
};

// Which queries and keys are shown.
function shown(which) {
  const wanted = at(which)?.value ?? "", padding = at("padding")?.checked ?? true;
  return tokens.map((_, i) => i).filter(i => (segments[i] >= 0 || padding) && (wanted === "" || segments[i] === +wanted));
}
const state = { layer: 0, head: 0, query: null, key: null };

// A map as an image, each pixel the largest of as many cells as come to lie in it.
function image(view, number, head, queries, keys, most) {
  const rows = Math.min(queries.length, most), columns = Math.min(keys.length, most), canvas = document.createElement("canvas"), found = new Float32Array(rows * columns).fill(NaN), masked = new Uint8Array(rows * columns).fill(1);
  queries.forEach((query, i) => {
    const row = Math.floor(i * rows / queries.length) * columns, start = (head * T + query) * T;
    keys.forEach((key, j) => {
      const cell = row + Math.floor(j * columns / keys.length), value = number(start + key);
      if (!visible[key] && !(view[0] === "w" && value > about.leak)) { if (masked[cell] && Number.isNaN(found[cell])) found[cell] = value; return; }
      if (masked[cell] || Number.isNaN(found[cell]) || Math.abs(value) > Math.abs(found[cell])) found[cell] = value;
      masked[cell] = 0;
    });
  });
  let top = 0;
  for (let i = 0; i < found.length; i++) if (!masked[i] && found[i] > top && found[i] <= 1.01) top = found[i];
  top = at("scale").value === "one" || !top ? 1 : top; rooted = at("scale").value === "root";
  canvas.width = columns; canvas.height = rows;
  const data = new ImageData(columns, rows), pixels = new Uint32Array(data.data.buffer);
  for (let i = 0; i < found.length; i++) pixels[i] = paint(view, found[i], masked[i], top);
  canvas.getContext("2d").putImageData(data, 0, 0);
  return { canvas, top };
}

// The grid of all heads.
const grid = at("grid"), buttons = [];
for (let layer = 0; layer < layers; layer++) {
  const row = document.createElement("div"), name = document.createElement("span"), line = document.createElement("div");
  row.className = "layer"; name.textContent = `layer ${layer}`; line.className = "heads"; row.append(name, line); row.dataset.layer = layer;
  for (let head = 0; head < heads; head++) {
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    button.type = "button"; button.setAttribute("aria-label", `layer ${layer} head ${head}`); button.dataset.head = head; button.append(canvas, `head ${head}`);
    button.addEventListener("click", () => choose(layer, head)); buttons.push(button); line.append(button);
  }
  grid.append(row);
}
grid.addEventListener("keydown", event => {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -heads, ArrowDown: heads }[event.key], here = buttons.indexOf(document.activeElement);
  if (!step || here < 0) return;
  event.preventDefault();
  for (let next = here + step; buttons[next]; next += step) if (buttons[next].offsetParent) { buttons[next].focus(); return; }
});
const stale = new Set(), inView = new Set();
const watcher = new IntersectionObserver(entries => { for (const { target, isIntersecting } of entries) { inView[isIntersecting ? "add" : "delete"](target); } fill(); }, { rootMargin: "100px" });
for (const row of grid.children) watcher.observe(row);
let filling = false;
async function fill() {
  if (filling) return;
  filling = true;
  for (let row; (row = [...inView].find(one => stale.has(one)) ?? [...stale][0]);) { // the others too: a printed page has all
    stale.delete(row);
    const number = values(await unpacked(+row.dataset.layer), at("view").value), queries = shown("from"), keys = shown("to");
    for (const button of row.querySelectorAll("button")) {
      if (button.hidden) continue;
      const drawn = image(at("view").value, number, +button.dataset.head, queries, keys, 120).canvas, canvas = button.firstChild;
      canvas.width = drawn.width; canvas.height = drawn.height;
      canvas.getContext("2d").drawImage(drawn, 0, 0);
    }
    await new Promise(requestAnimationFrame);
  }
  filling = false;
}
function restale() {
  const only = [at("layer").value, at("head").value];
  for (const row of grid.children) {
    row.hidden = only[0] !== "" && row.dataset.layer !== only[0];
    row.style.display = row.hidden ? "none" : "";
    for (const button of row.querySelectorAll("button")) { button.hidden = only[1] !== "" && button.dataset.head !== only[1]; button.style.display = button.hidden ? "none" : ""; }
    stale.add(row);
  }
  fill();
}

// One head large: a panel for each side, and one for the difference or the error.
const panels = at("panels"), FONT = "12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', 'Noto Sans Mono CJK SC', monospace";
class Panel {
  constructor(view) {
    this.view = view; this.figure = document.createElement("figure"); this.caption = document.createElement("figcaption"); this.frame = document.createElement("div");
    this.plane = document.createElement("div"); this.room = document.createElement("div"); this.canvas = document.createElement("canvas");
    this.frame.className = "frame"; this.plane.className = "plane"; this.plane.tabIndex = 0; this.plane.setAttribute("role", "application");
    this.plane.append(this.room); this.frame.append(this.plane, this.canvas); this.figure.append(this.caption, this.frame); panels.append(this.figure);
    this.plane.addEventListener("scroll", () => { for (const other of drawn) if (other !== this && (other.plane.scrollLeft !== this.plane.scrollLeft || other.plane.scrollTop !== this.plane.scrollTop)) { other.plane.scrollLeft = this.plane.scrollLeft; other.plane.scrollTop = this.plane.scrollTop; } this.draw(); });
    for (const kind of ["pointermove", "pointerdown"]) this.plane.addEventListener(kind, event => this.point(event));
    this.plane.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") { at("tip").hidden = true; } });
    this.plane.addEventListener("keydown", event => this.key(event));
  }
  async show() {
    const layer = state.layer, head = state.head, sides = await unpacked(layer);
    if (layer !== state.layer || head !== state.head) return;
    this.queries = shown("from"); this.keys = shown("to"); this.sides = sides;
    this.number = values(sides, this.view);
    const name = nameOf(this.view);
    const pen = this.canvas.getContext("2d"); pen.font = FONT;
    const widest = Math.ceil(Math.max(...[...this.queries, ...this.keys].map(i => pen.measureText(label(i)).width), 12));
    const room = this.frame.clientWidth - 2, asked = +at("zoom").value;
    this.margin = Math.min(widest + 12, room < 420 ? 74 : 110);
    const fitted = Math.min(26, (room - this.margin - 2) / Math.max(this.keys.length, 1));
    if (!asked && fitted < 8) this.margin = 34;
    this.cell = asked || Math.min(26, (room - this.margin - 2) / Math.max(this.keys.length, 1));
    this.picture = image(this.view, this.number, head, this.queries, this.keys, this.cell < 1 ? Math.floor((room - this.margin) * devicePixelRatio) : T);
    const wide = this.margin + this.cell * this.keys.length + 1, high = this.margin + this.cell * this.queries.length + 1;
    this.room.style.width = `${wide}px`; this.room.style.height = `${high}px`;
    this.caption.textContent = name;
    const told = document.createElement("span");
    told.textContent = this.view[0] === "w" ? `0 to ${digits(this.picture.top)}` : `largest: ${digits(this.largest(head))} tolerances`;
    this.caption.append(told);
    this.plane.setAttribute("aria-label", `${name}, layer ${layer} head ${head}: arrow keys go from cell to cell`);
    this.draw();
  }
  largest(head) {
    let found = 0;
    for (const query of this.queries) for (const key of this.keys) { const size = Math.abs(this.number((head * T + query) * T + key)); if (size > found) found = size; }
    return found;
  }
  draw() {
    if (!this.picture) return;
    const { plane, canvas, margin, cell, queries, keys } = this, wide = plane.clientWidth, high = plane.clientHeight, fine = devicePixelRatio || 1, left = plane.scrollLeft, top = plane.scrollTop;
    canvas.width = Math.round(wide * fine); canvas.height = Math.round(high * fine); canvas.style.width = `${wide}px`; canvas.style.height = `${high}px`;
    const pen = canvas.getContext("2d"); pen.scale(fine, fine); pen.imageSmoothingEnabled = false;
    const x = j => margin + j * cell - left, y = i => margin + i * cell - top;
    pen.save(); pen.beginPath(); pen.rect(margin, margin, x(keys.length) - margin, y(queries.length) - margin); pen.clip();
    pen.drawImage(this.picture.canvas, x(0), y(0), cell * keys.length, cell * queries.length);
    if (cell >= 4) keys.forEach((key, j) => { if (!visible[key] && x(j + 1) > margin && x(j) < wide) { pen.fillStyle = colour.hatch; pen.fillRect(x(j), y(0), cell, cell * queries.length); } });
    if (cell >= 5 && this.view[0] !== "w") this.frameBeyond(pen, x, y, wide, high);
    pen.strokeStyle = colour.css("--ink"); pen.lineWidth = 1; pen.beginPath();
    for (let j = 1; j < keys.length; j++) if (segments[keys[j]] !== segments[keys[j - 1]]) { pen.moveTo(Math.round(x(j)) + .5, y(0)); pen.lineTo(Math.round(x(j)) + .5, y(queries.length)); }
    for (let i = 1; i < queries.length; i++) if (segments[queries[i]] !== segments[queries[i - 1]]) { pen.moveTo(x(0), Math.round(y(i)) + .5); pen.lineTo(x(keys.length), Math.round(y(i)) + .5); }
    pen.stroke();
    const i = queries.indexOf(state.query), j = keys.indexOf(state.key);
    if (i >= 0 && j >= 0) {
      pen.strokeStyle = colour.css("--plus-over"); pen.lineWidth = 1.5;
      pen.strokeRect(x(j) - .75, y(i) - .75, Math.max(cell, 2) + 1.5, Math.max(cell, 2) + 1.5);
      pen.globalAlpha = .35; pen.strokeRect(margin, y(i), wide, cell); pen.strokeRect(x(j), margin, cell, high); pen.globalAlpha = 1;
    }
    pen.restore();
    this.labels(pen, x, y, wide, high, i, j);
  }
  frameBeyond(pen, x, y, wide, high) {
    pen.strokeStyle = colour.css("--ink"); pen.lineWidth = 1;
    this.queries.forEach((query, i) => {
      if (y(i) > high || y(i + 1) < 0) return;
      this.keys.forEach((key, j) => { if (visible[key] && x(j) < wide && Math.abs(this.number((state.head * T + query) * T + key)) > 1) pen.strokeRect(x(j) + 1, y(i) + 1, this.cell - 2, this.cell - 2); });
    });
  }
  labels(pen, x, y, wide, high, chosenRow, chosenColumn) {
    const { margin, cell, queries, keys } = this, step = cell >= 10 ? 1 : [2, 5, 10, 20, 50, 100].find(step => step * cell >= 14) ?? 200, words = step === 1, room = margin - 8;
    pen.font = FONT; pen.textBaseline = "middle";
    const put = (which, chosen) => { pen.fillStyle = colour.css(chosen ? "--ink" : segments[which] < 0 ? "--none" : "--muted"); const text = words ? label(which) : String(which); return fit(pen, text, room); };
    pen.save(); pen.beginPath(); pen.rect(0, margin, margin, high); pen.clip(); pen.textAlign = "right";
    queries.forEach((query, i) => { if ((i % step === 0 || i === chosenRow) && y(i) > -cell && y(i) < high) pen.fillText(put(query, i === chosenRow), margin - 7, y(i) + cell / 2); });
    pen.restore(); pen.save(); pen.beginPath(); pen.rect(margin, 0, wide, margin); pen.clip(); pen.textAlign = "left";
    keys.forEach((key, j) => { if ((j % step === 0 || j === chosenColumn) && x(j) > -cell && x(j) < wide) { pen.save(); pen.translate(x(j) + cell / 2, margin - 7); column(pen, put(key, j === chosenColumn)); pen.restore(); } });
    pen.restore();
    const bands = (list, draw) => list.forEach((which, i) => { if (segments[which] >= 0 && Math.max(...segments) > 0) { pen.fillStyle = colour.css(`--s${segments[which] % 8}`); draw(i); } });
    pen.save(); pen.beginPath(); pen.rect(margin - 5, margin - 5, wide, high); pen.clip();
    bands(queries, i => { if (y(i + 1) > margin) pen.fillRect(margin - 4, Math.max(y(i), margin), 3, Math.min(cell, y(i + 1) - margin)); });
    bands(keys, j => { if (x(j + 1) > margin) pen.fillRect(Math.max(x(j), margin), margin - 4, Math.min(cell, x(j + 1) - margin), 3); });
    pen.restore();
  }
  point(event) {
    const box = this.plane.getBoundingClientRect(), across = event.clientX - box.left - 1, down = event.clientY - box.top - 1;
    const j = Math.floor((across + this.plane.scrollLeft - this.margin) / this.cell), i = Math.floor((down + this.plane.scrollTop - this.margin) / this.cell);
    if (across < this.margin || down < this.margin || !(i >= 0 && i < this.queries.length && j >= 0 && j < this.keys.length)) { at("tip").hidden = true; return; }
    go(this.queries[i], this.keys[j]);
    const tip = at("tip"); tip.textContent = say("\n"); tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${event.clientY + 20 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : event.clientY + 20}px`;
  }
  key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -T], End: [0, T], PageUp: [-T, 0], PageDown: [T, 0] }[event.key];
    if (!steps) return;
    event.preventDefault();
    const clamp = (value, size) => Math.max(0, Math.min(size - 1, value)), first = state.query === null;
    const i = clamp((first ? 0 : this.queries.indexOf(state.query) + steps[0]), this.queries.length), j = clamp((first ? 0 : this.keys.indexOf(state.key) + steps[1]), this.keys.length);
    go(this.queries[i], this.keys[j]);
    const { plane, margin, cell } = this, x = margin + j * cell, y = margin + i * cell;
    if (x - plane.scrollLeft < margin) plane.scrollLeft = x - margin; else if (x + cell - plane.scrollLeft > plane.clientWidth) plane.scrollLeft = x + cell - plane.clientWidth;
    if (y - plane.scrollTop < margin) plane.scrollTop = y - margin; else if (y + cell - plane.scrollTop > plane.clientHeight) plane.scrollTop = y + cell - plane.clientHeight;
  }
}
const label = i => tokens[i];
// A label above a column, upward from its foot: turned, but for Chinese, Japanese and Korean, whose signs stand upright.
function column(pen, text) {
  const signs = [...text];
  if (!/[\u2e80-\u9fff\uac00-\ud7af\uff00-\uffef]/.test(text)) { pen.rotate(-Math.PI / 2); pen.fillText(text, 0, 0); return; }
  pen.textAlign = "center";
  signs.forEach((sign, n) => pen.fillText(sign, 0, -5 - 12 * (signs.length - 1 - n)));
}

function fit(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  const signs = [...text];
  while (signs.length > 1 && pen.measureText(signs.join("") + "…").width > room) signs.pop();
  return signs.join("") + "…";
}
const digits = value => Number.isNaN(value) ? "not determined" : !Number.isFinite(value) ? (value < 0 ? "below −65504" : "above 65504") : value === 0 ? "0" : Math.abs(value) < 1e-4 || Math.abs(value) >= 1e4 ? value.toExponential(1) : value.toPrecision(3);
const named = i => `${i} “${tokens[i]}”${segments[i] < 0 ? " (padding)" : Math.max(...segments) > 0 ? ` (${letter(segments[i])})` : ""}`;
function say(between) {
  const sides = drawn[0]?.sides, { query, key } = state;
  if (!sides || query === null) return "";
  const place = (state.head * T + query) * T + key;
  const lines = [`query ${named(query)} → key ${named(key)}${visible[key] ? "" : ": masked"}`];
  about.sides.forEach((name, side) => { const weight = halves[sides[side].w[place]]; lines.push(`${name}: ${weight >= 0 && weight <= 1.01 ? digits(weight) : Number.isNaN(weight) ? "no weight" : "overwritten"}, error ${digits(halves[sides[side].e[place]])} tolerances`); });
  if (about.sides.length > 1) lines.push(`${nameOf("d")}: ${digits(values(sides, "d")(place))} tolerances`);
  return lines.join(between);
}
function go(query, key) {
  state.query = query; state.key = key;
  at("cell").textContent = say("; ");
  for (const panel of drawn) panel.draw();
}
let drawn = [];
function arrange() {
  panels.replaceChildren();
  drawn = (about.sides.length > 1 ? [...pair().map(side => `w${side}`), "d"] : ["w0", "e0"]).map(view => new Panel(view));
}
function enlarge() {
  at("large-title").textContent = `Layer ${state.layer}, head ${state.head}`;
  for (const panel of drawn) panel.show();
  buttons.forEach((button, i) => { const chosen = i === state.layer * heads + state.head; button.setAttribute("aria-pressed", chosen); button.tabIndex = chosen ? 0 : -1; });
  at("cell").textContent = say("; ") || "Point at a cell for its values.";
}
function choose(layer, head) {
  state.layer = layer; state.head = head; enlarge();
  if (at("large-title").getBoundingClientRect().top < 0) at("large-title").scrollIntoView({ block: "start" });
}
function legend() {
  const ramp = (id, pixel) => { const canvas = at(id), data = new ImageData(canvas.width, canvas.height), pixels = new Uint32Array(data.data.buffer); for (let i = 0; i < pixels.length; i++) pixels[i] = pixel(i % canvas.width / (canvas.width - 1)); canvas.getContext("2d").putImageData(data, 0, 0); };
  ramp("ramp-w", share => colour.ramp[Math.round(255 * share)]);
  ramp("ramp-e", share => { const place = 3 * share - 1.5; return colour.error(Math.abs(place) > 1 ? Math.sign(place) * 100 ** (2 * Math.abs(place) - 2) : place); });
  ramp("ramp-m", () => colour.mask); ramp("ramp-n", () => colour.none);
  const pen = at("ramp-m").getContext("2d"); pen.fillStyle = colour.hatch; pen.fillRect(0, 0, 14, 14);
}
controls.addEventListener("submit", event => event.preventDefault());
controls.addEventListener("change", event => {
  const { id, value } = event.target;
  if (id === "layer" && value !== "") state.layer = +value;
  if (id === "head" && value !== "") state.head = +value;
  if (id === "one" || id === "other") arrange();
  if (id !== "zoom") restale();
  enlarge();
});
document.addEventListener("click", event => {
  const button = event.target.closest?.("button.go");
  if (button) choose(+button.dataset.layer, +button.dataset.head);
});
const redo = () => { colours(); legend(); restale(); enlarge(); };
// A printer ends the dark scheme too, and does not wait until all heads are drawn again: the style turns them instead.
few.addEventListener("change", () => matchMedia("print").matches || redo());
let wait;
addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(enlarge, 150); });
// At first the head in which most differs, if any lies beyond its tolerance.
arrange(); state.layer = about.start[0]; state.head = about.start[1]; redo();
