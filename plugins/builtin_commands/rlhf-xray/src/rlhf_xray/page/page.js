"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const chosen = new Set(data.shown);
const byId = (id) => document.getElementById(id);

function make(tag, text, parent, name) {
  const element = document.createElement(tag);
  if (text !== null && text !== undefined) element.textContent = text;
  if (name) element.className = name;
  if (parent) parent.append(element);
  return element;
}

function paint(element, share) {
  if (!share) return;
  const strength = 0.08 + 0.62 * Math.sqrt(Math.min(1, Math.abs(share)));
  element.style.background = `rgba(var(${share > 0 ? "--good" : "--bad"}), ${strength.toFixed(3)})`;
}

function short(value) {
  return value === 0 ? "0" : Number(value.toPrecision(3)).toString();
}

function algorithms() {
  const table = byId("algorithms");
  const head = make("tr", null, make("thead", null, table));
  make("th", "algorithm", head, "name").scope = "col";
  for (const title of ["length", "rows", "tokens", "half in"]) make("th", title, head).scope = "col";
  data.algorithms.forEach((each, number) => { const cell = make("th", number + 1, head, "cosine"); cell.scope = "col"; cell.title = each.name; });
  const least = Math.min(...data.cosines.flat().filter((value) => value !== null));
  const body = make("tbody", null, table);
  data.algorithms.forEach((each, number) => {
    const row = make("tr", null, body);
    const label = make("label", null, make("td", null, row, "name"));
    const box = make("input", null, label);
    box.type = "checkbox";
    box.checked = chosen.has(number);
    box.addEventListener("change", () => { box.checked ? chosen.add(number) : chosen.delete(number); answers(); });
    make("span", `${number + 1} ${each.name}`, label);
    const unseen = each.length > 0 && each.largest === 0;
    for (const value of [short(each.length), each.rows, each.tokens, each.half]) make("td", unseen && typeof value === "number" ? "–" : value, row);
    data.cosines[number].forEach((value, other) => {
      const cell = make("td", value === null ? "–" : value.toFixed(2).replace("0.", ".").replace("1.00", "1"), row, "cosine");
      cell.title = `${each.name} and ${data.algorithms[other].name}: ${value === null ? "one has no gradient" : value}`;
      if (value !== null && least < 1) cell.style.background = `rgba(var(--same), ${(0.5 * ((value - least) / (1 - least)) ** 2).toFixed(3)})`;
    });
  });
  for (const group of data.alike) make("p", `One direction: ${group.join(", ")}`, byId("alike"));
}

function column(answer, number, parent) {
  const each = data.algorithms[number];
  const place = make("div", null, parent, "column");
  const push = answer.push[number];
  const acting = push.some((value) => value !== 0);
  make("small", acting ? each.name : `${each.name}: ${each.length > 0 && each.largest === 0 ? "reads whole distributions" : "does not act"}`, place);
  const text = make("div", null, place, "text");
  answer.pieces.forEach((piece, token) => {
    const part = make("button", piece, text);
    part.type = "button";
    paint(part, push[token] / 1000);
    part.addEventListener("click", () => {
      document.querySelectorAll("[aria-pressed]").forEach((old) => old.removeAttribute("aria-pressed"));
      part.setAttribute("aria-pressed", "true");
      const share = (push[token] / 10).toFixed(1);
      byId("token").textContent = `${each.name}: ${JSON.stringify(piece)}, push ${short(push[token] / 1000 * each.largest)} (${share} % of the strongest), probability ${short(Math.exp(answer.logprobs[token]))}`;
    });
  });
}

function answers() {
  const place = byId("answers");
  place.replaceChildren();
  const numbers = [...chosen].sort((one, other) => one - other);
  data.answers.forEach((answer, number) => {
    if (!number || answer.group !== data.answers[number - 1].group) make("p", answer.prompt, place, "prompt");
    const part = make("article", null, place, "answer");
    const label = answer.label === null ? "" : `, label ${typeof answer.label === "string" ? answer.label : JSON.stringify(answer.label)}`;
    make("h3", `reward ${short(answer.reward)}${label}`, part);
    const columns = make("div", null, part, "columns");
    numbers.forEach((each) => column(answer, each, columns));
  });
}

data.about.forEach((line) => make("p", line, byId("about")));
algorithms();
answers();
byId("token").textContent = "No token is chosen.";
byId("left").textContent = data.left ? `${data.left} more answers, whose tokens are pushed less, are not on this page (--rows 0: all).` : "";
if (data.left_out.length) make("h2", "Left out", byId("out"));
for (const [names, why] of data.left_out) make("p", `${names}: ${why}`, byId("out"));
