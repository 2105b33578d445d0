"use strict";
// What all parts share: the runs, what is chosen, elements, pieces of data, and texts of numbers and times.
const COLORS = ["#2f6fde", "#d4622a", "#23895a", "#b4489c", "#7f841f", "#6a6ee0", "#c2454b", "#2f8c9c"];
let runs = [];
const chosen = { smooth: 0, axis: "step", filter: "", hidden: new Set(), group: "", order: "drawn", colour: "advantage" };

function element(tag, properties = {}, ...children) {
  const { data, attributes, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, data || {});
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

// A name with places where a line may break, so that no word is cut.
function breakable(name) {
  const parts = String(name).split(/(?<=[/._-])(?=\p{L})/u);
  return parts.flatMap((part, place) => (place ? [document.createElement("wbr"), part] : [part]));
}

function swatch(colour) {
  return element("span", { className: "swatch", style: `background: ${colour}` });
}

// A table; on narrow screens each row is a block, and cells say their column.
function table(id, names, rows) {
  const head = element("tr", {}, names.map((name) => element("th", { scope: "col" }, breakable(name))));
  const lines = rows.map((cells) => element("tr", { className: cells.className ?? "" }, (cells.cells ?? cells).map((cell, place) => {
    const inside = Array.isArray(cell) || cell instanceof Node ? cell : breakable(cell ?? "");
    const colSpan = cells.className === "group" ? names.length : 1;
    return element("td", { colSpan, className: cell ? "" : "empty", data: { column: names[place] } }, element("div", {}, inside));
  })));
  return element("table", { id, className: "stacks" }, element("thead", {}, head), element("tbody", {}, lines));
}

async function chunk(id) {
  const here = document.getElementById(id);
  if (here) return unpack(Uint8Array.from(atob(here.textContent), (letter) => letter.charCodeAt(0)));
  const answer = await fetch(`chunk/${id}`);
  if (!answer.ok) throw new Error((await answer.json()).error?.message ?? answer.status);
  if (id === "head") stamp = answer.headers.get("ETag") ?? stamp;
  return unpack(await answer.arrayBuffer());
}

async function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function number(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (value !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

function counted(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

function duration(seconds) {
  for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60]]) {
    if (seconds >= 2 * size) return counted(Math.round(seconds / size), unit);
  }
  return counted(Math.max(1, Math.round(seconds)), "second");
}

function moment(seconds) {
  return `${new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

// The address says what is shown: #step=120, #tab=Answers&step=120&run=usual, #group=algo.name

function shown() {
  const words = new URLSearchParams(location.hash.slice(1)), step = words.get("step");
  const place = runs.findIndex((run) => run.name === words.get("run"));
  const tab = Object.keys(TABS).find((name) => name.toLowerCase() === words.get("tab")?.toLowerCase());
  return { tab: tab ?? Object.keys(TABS)[0], step: step !== null && /^\d+$/.test(step) ? Number(step) : null, split: words.get("split"), group: words.get("group") ?? "", run: Math.max(0, place) };
}

function address(changes) {
  const next = { ...shown(), ...changes }, words = new URLSearchParams();
  if (next.tab !== Object.keys(TABS)[0]) words.set("tab", next.tab);
  if (next.step !== null) words.set("step", next.step);
  if (next.split) words.set("split", next.split);
  if (next.group) words.set("group", next.group);
  if (next.run) words.set("run", runs[next.run].name);
  return `#${words}`;
}

function go(changes) {
  location.hash = address(changes);
}
