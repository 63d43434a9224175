// Tables marked data-find can be searched and sorted; without this script they are read as they are.
for (const table of document.querySelectorAll("table[data-find]")) {
  const body = table.tBodies[0], rows = [...body.rows], box = document.createElement("input"), count = document.createElement("span");
  if (rows.length < 4) continue;
  box.type = "search"; box.placeholder = "find " + table.dataset.find; box.setAttribute("aria-label", "find " + table.dataset.find);
  count.className = "quiet"; count.setAttribute("role", "status");
  const bar = document.createElement("p"); bar.className = "find"; bar.append(box, " ", count);
  table.parentElement.before(bar);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of rows) shown += !(row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word)));
    count.textContent = box.value ? shown + " of " + rows.length : "";
  });
  const value = (row, place) => {
    const cell = row.cells[place], text = (cell?.dataset.value ?? cell?.textContent ?? "").trim(), number = text.startsWith("inf") ? Infinity : parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  const order = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? 1 : -1;
  [...table.tHead.rows[0].cells].forEach((head, place) => {
    const button = document.createElement("button"); button.type = "button"; button.append(...head.childNodes); head.append(button);
    button.addEventListener("click", () => {
      // Largest numbers first, since those are looked for; then smallest first; then as it was.
      const now = head.getAttribute("aria-sort"), next = { descending: "ascending", ascending: "none" }[now] ?? "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (next !== "none") head.setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      body.append(...(next === "none" ? rows : [...rows].sort((a, b) => sign * order(value(a, place), value(b, place)))));
    });
  });
}
// What a link leads to is opened.
const open = () => { for (let at = document.getElementById(location.hash.slice(1)); at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true; };
addEventListener("hashchange", open); open();
