// Answers by group: the prompt, and what each answer got for it.
const GROUPS_SHOWN = 200, LONG = 500;
const ORDERS = {
  drawn: () => 0,
  "highest reward": (a, b) => meanReward(b) - meanReward(a),
  "lowest reward": (a, b) => meanReward(a) - meanReward(b),
  "largest spread": (a, b) => spread(b) - spread(a),
};
const COLOURS = ["advantage", "log-probability", "mismatch", "version", "nothing"];

const judged = (each) => each.rows.map((row) => row.reward).filter((reward) => typeof reward === "number");
const meanReward = (each) => (judged(each).length ? average(judged(each)) : NaN);
function spread(each) { const all = judged(each), middle = average(all); return all.length ? Math.sqrt(average(all.map((one) => (one - middle) ** 2))) : NaN; }
const promptOf = (each) => each.turns.map(([, text]) => text).join("\n").trim();

// The end of a text, from a word on.
function tail(text, most) {
  const flat = text.replace(/\s+/g, " ").trim();
  if (flat.length <= most) return flat;
  const end = flat.slice(-most), space = end.indexOf(" ");
  return `… ${space >= 0 && space < 40 ? end.slice(space + 1) : end}`;
}

// The saved step that is meant: the chosen one or the nearest, else the last.
function placeOf(run, { step, split }) {
  if (!run.places.length) return -1;
  const wanted = split && run.places.some(([kind]) => kind === split) ? split : null;
  const places = run.places.map(([kind, at], place) => ({ kind, at, place })).filter(({ kind }) => !wanted || kind === wanted);
  if (step === null) return (places.findLast(({ kind }) => kind === "train") ?? places.at(-1)).place;
  const rank = ({ kind, at }) => 2 * Math.abs(at - step) + (kind === "train" ? 0 : 1);
  return places.reduce((best, each) => (rank(each) < rank(best) ? each : best)).place;
}

const SPLITS = { train: "training", eval: "evaluation" };
const placeName = ([kind, at]) => `${SPLITS[kind] ?? kind}, step ${at}`;
const loaded = new Map();
function answersOf(run, place) {
  const [split, step] = runs[run].places[place], id = `run${run}-${split}-${step}`;
  if (!loaded.has(id)) {
    if (loaded.size > 8) loaded.clear();
    loaded.set(id, chunk(id).catch((error) => { loaded.delete(id); throw error; }));
  }
  return loaded.get(id);
}

function nearNote(run, place, step) {
  const at = run.places[place][1];
  return step === null || at === step ? null : element("p", { className: "dim", textContent: `Step ${step} saved no answers (see trajectories.every); these are of the nearest step that did, ${at}.` });
}

// On the first tab: one good and one bad answer of the step.
function preview() {
  const holder = element("div", { id: "preview" });
  const where = shown(), run = runs[where.run], place = placeOf(run, where);
  if (place < 0) {
    holder.append(element("p", { className: "dim", textContent: "No answers were saved yet." }));
    return holder;
  }
  const reading = element("p", { className: "dim", textContent: "Reading ..." });
  holder.append(reading);
  telling(where, place).then(([chosenPlace, rows]) => {
    const [split, step] = run.places[chosenPlace];
    const near = nearNote(run, chosenPlace, where.step), all = element("a", { href: address({ tab: "Answers", step, split }), textContent: `All answers of ${placeName([split, step])}` });
    reading.remove();
    holder.append(...[near, element("p", {}, runs.length > 1 ? `${run.name}: ` : null, all)].filter(Boolean));
    if (!rows.length) return;
    const ends = differ(rows) ? [["Highest reward", rows[0]], ["Lowest reward", rows.at(-1)]] : [["An answer: all saved ones got the same reward", rows[0]]];
    holder.prepend(element("div", { className: "pair" }, ends.map(([title, [each, row]]) => element("article", { className: "chart" }, element("h3", { textContent: title }), prompt(each), answer(row, Infinity, each.label)))));
  }).catch((error) => reading.replaceWith(element("p", { className: "warning", textContent: error.message })));
  return holder;
}

const differ = (rows) => rows.length > 0 && rows[0][1].reward > rows.at(-1)[1].reward;

// Judged answers of a saved step with their groups, the best first. Where all have the same reward and no step is chosen, of the last evaluation if there they differ.
async function telling(where, place) {
  const read = async (at) => [at, (await answersOf(where.run, at)).flatMap((each) => each.rows.filter((row) => typeof row.reward === "number").map((row) => [each, row])).sort((a, b) => b[1].reward - a[1].reward)];
  const first = await read(place), evaluated = runs[where.run].places.findLastIndex(([split]) => split === "eval");
  if (differ(first[1]) || where.step !== null || evaluated < 0 || evaluated === place) return first;
  const second = await read(evaluated);
  return differ(second[1]) ? second : first;
}

async function answersTab(main) {
  const where = shown(), run = runs[where.run];
  const whose = element("select", { id: "run" }, runs.map((each, place) => element("option", { value: place, textContent: each.name, selected: place === where.run })));
  whose.onchange = () => go({ run: Number(whose.value) });
  const ofRun = runs.length > 1 ? element("label", {}, "run", whose) : null;
  const at = placeOf(run, where);
  if (at < 0) {
    main.append(element("div", { className: "bar" }, ofRun), element("p", { className: "dim", textContent: "No answers were saved yet: trajectories.every says at which steps they are." }));
    renew = () => { if (runs[where.run].places.length) render(); };
    return;
  }
  const [split, step] = run.places[at];
  const place = element("select", { id: "place" });
  const fillPlaces = () => place.replaceChildren(...runs[where.run].places.map((each, number) => element("option", { value: number, textContent: placeName(each), selected: each[0] === split && each[1] === step })));
  fillPlaces();
  renew = fillPlaces;
  place.onchange = () => { const [kind, of] = runs[where.run].places[Number(place.value)]; go({ step: of, split: kind }); };
  const order = element("select", { id: "order" }, Object.keys(ORDERS).map((name) => element("option", { textContent: name, selected: name === chosen.order })));
  order.onchange = () => { chosen.order = order.value; render(); };
  const find = element("input", { id: "find", type: "search", placeholder: "text" });
  const colour = element("select", { id: "colour" }, COLOURS.map((name) => element("option", { textContent: name, selected: name === chosen.colour })));
  main.append(element("div", { className: "bar" }, ofRun, element("label", {}, "of", place), element("label", {}, "order", order), element("label", {}, "find", find), element("label", {}, "colour by", colour)));
  const near = nearNote(run, at, where.step);
  if (near) main.append(near);
  if (run.left_out.length) main.append(element("p", { className: "dim", textContent: `Left out, as the page would be too large: ${run.left_out.join(", ")}` }));
  const list = element("div", { className: "list", id: "groups", tabIndex: 0, attributes: { role: "region", "aria-label": "prompts" } }), detail = element("div", { id: "group" });
  main.append(element("div", { className: "browser" }, list, detail));
  let found;
  try {
    found = [...(await answersOf(where.run, at))].sort(ORDERS[chosen.order]);
  } catch (error) {
    detail.append(element("p", { className: "warning", textContent: error.message }));
    return;
  }
  let most = GROUPS_SHOWN, opened = 0;
  const open = (number) => {
    opened = number;
    for (const button of list.querySelectorAll("button[data-place]")) button.setAttribute("aria-pressed", String(Number(button.dataset.place) === number));
    detail.replaceChildren(...(found[number] ? group(found[number]) : [element("p", { className: "dim", textContent: "Nothing found." })]));
  };
  const fill = () => {
    const words = find.value.trim().toLowerCase();
    const fits = found.map((each, number) => [each, number]).filter(([each]) => !words || JSON.stringify(each, (name, value) => (name === "uri" ? undefined : value)).toLowerCase().includes(words));
    list.replaceChildren(...fits.slice(0, most).map(([each, number_]) => {
      const worth = judged(each).length ? `reward ${number(meanReward(each))}${spread(each) ? `, spread ${number(spread(each))}` : ""}` : "unjudged";
      const button = element("button", { type: "button", data: { place: number_ } }, element("small", { textContent: `${worth} · ${counted(each.rows.length, "answer")}` }), tail(promptOf(each), 110));
      button.onclick = () => open(number_);
      return button;
    }));
    if (fits.length > most) {
      const more = element("button", { type: "button", textContent: `${fits.length - most} more` });
      more.onclick = () => { most += GROUPS_SHOWN; fill(); };
      list.append(more);
    }
    open(fits.some(([, number_]) => number_ === opened) ? opened : fits.length ? fits[0][1] : -1);
  };
  find.oninput = fill;
  colour.onchange = () => { chosen.colour = colour.value; open(opened); };
  fill();
}

function group(each) {
  const label = each.label === null || each.label === undefined ? null : element("p", { className: "dim", textContent: `label ${asText(each.label)}` });
  const scale = Math.max(1e-9, ...each.rows.flatMap((row) => [Math.abs(row.advantage || 0), ...(row.segments || []).flatMap((part) => (part.advantages || []).map(Math.abs))]));
  const parts = [element("h2", {}, breakable(`${each.source ?? "task"} ${each.task ?? ""}`)), prompt(each), label, ...each.rows.map((row) => answer(row, scale))];
  return parts.filter(Boolean);
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function said(speaker, ...content) {
  const text = element("div", { className: "text" }, content);
  return element("div", { className: `said ${speaker === "Model" ? "model" : ""}` }, element("div", { className: "speaker", textContent: speaker }), text);
}

// The end of a prompt, and all of it on a click.
function prompt(each) {
  if (each.seen) return element("div", { className: "prompt" }, said("Prompt", pictured(each.seen)));
  const whole = each.turns.reduce((sum, [, text]) => sum + text.length, 0);
  const [speaker, last] = each.turns.at(-1);
  const holder = element("div", { className: "prompt" });
  const short = () => {
    const cut = last.length > LONG || each.turns.length > 1;
    const end = last.length > LONG ? `… ${last.slice(-LONG).replace(/^\S*\s/, "")}` : last;
    holder.replaceChildren(said(speaker, end));
    if (cut) holder.append(toggle(`the whole prompt (${whole.toLocaleString("en")} characters${each.turns.length > 1 ? `, ${each.turns.length} messages` : ""})`, all));
  };
  const all = () => holder.replaceChildren(...each.turns.map(([who, text]) => said(who, text)), toggle("only its end", short));
  short();
  return holder;
}

function toggle(title, act) {
  const button = element("button", { type: "button", className: "link", textContent: title });
  button.onclick = act;
  return button;
}

function pictured(parts) {
  return parts.map((part) => {
    if (typeof part === "string") return part;
    const name = `[picture ${part.picture}]`, title = `${part.width}×${part.height} pixels, ${part.file}`;
    return element("span", { className: "picture", title }, part.uri ? element("img", { src: part.uri, alt: name }) : null, element("small", { textContent: `${name} ${part.width}×${part.height}` }));
  });
}

// Who speaks in a row, in its order: speaker, content, and text below it.
function* speeches(row, scale) {
  const model = row.role ? `Model as ${row.role}` : "Model";
  const parts = (row.segments || []).filter((part) => part.tokens || part.text || part.seen);
  if (!parts.length) {
    if (row.turns) for (const [speaker, text] of row.turns) yield [speaker, [text]];
    else yield [model, row.seen ? pictured(row.seen) : [row.text || ""], tint(chosen.colour === "advantage" ? row.advantage / scale : 0)];
    return;
  }
  for (const part of parts) {
    const plain = [part.text ?? (part.tokens || []).join("")];
    if (part.kind === "action") yield [model, part.tokens ? part.tokens.map((token, place) => mark(token, part, place, row, scale)) : plain];
    else if (part.seen) yield ["Environment", pictured(part.seen)];
    else if (part.turns) for (const [speaker, text] of part.turns) yield [speaker, [text]];
    else yield ["Environment", plain];
  }
}

function answer(row, scale, label) {
  const facts = [row.reward === undefined || row.reward === null ? `unjudged: ${row.unjudged || ""}` : `reward ${number(row.reward)}`];
  const rewards = Object.entries(row.rewards || {});
  if (rewards.length > 1) facts.push(rewards.map(([name, value]) => `${name} ${value === null ? "-" : number(value)}`).join(", "));
  if (row.score !== undefined && row.score !== row.reward) facts.push(`score ${number(row.score)}`);
  if (label !== undefined && label !== null) facts.push(`label ${asText(label)}`);
  if (row.advantage !== undefined) facts.push(`advantage ${number(row.advantage)}`);
  facts.push([counted(row.length ?? 0, "token"), row.finish_reason === "length" ? "cut off" : ""].filter(Boolean).join(", "));
  if (row.final === false) facts.push("not judged by itself");
  const branch = row.tree && row.tree.parent !== null && row.tree.parent !== undefined;
  if (branch) facts.push(`row ${row.tree.row}, from row ${row.tree.parent} behind its first ${row.tree.branch} tokens`);
  const made = element("div", { className: branch ? "row branch" : "row" }, element("div", { className: "facts" }, facts.map((fact) => element("span", { textContent: fact }))));
  for (const [speaker, content, style] of speeches(row, scale)) {
    const part = said(speaker, content);
    part.classList.toggle("model", speaker.startsWith("Model"));
    if (style) part.lastChild.style = style;
    made.append(part);
    const size = part.lastChild.textContent.length;
    if (size > 3 * LONG) {
      part.classList.add("long");
      const more = toggle(`the whole text (${size.toLocaleString("en")} characters)`, () => { part.classList.remove("long"); more.remove(); });
      made.append(more);
    }
  }
  if (row.events) made.append(element("details", {}, element("summary", { textContent: counted(row.events.length, "event") }), element("div", { className: "text", textContent: row.events.map((event) => JSON.stringify(event)).join("\n") })));
  return made;
}

function mark(token, part, place, row, scale) {
  const advantage = part.advantages ? part.advantages[place] : row.advantage;
  const logprob = part.logprobs[place], version = part.versions[place];
  const gap = part.trainer_logprobs ? part.trainer_logprobs[place] - logprob : undefined;
  const value = { advantage: (advantage || 0) / scale, "log-probability": Math.max(-1, logprob / 4), mismatch: gap === undefined ? 0 : 10 * gap, version: part.versions[0] === version ? 0 : (version - part.versions[0]) / 4, nothing: 0 }[chosen.colour];
  const title = `log-probability ${number(logprob)}, version ${version}${advantage === undefined ? "" : `, advantage ${number(advantage)}`}${gap === undefined ? "" : `, trainer ${number(gap)} away`}`;
  return element("mark", { textContent: token, title, style: tint(value) });
}

function tint(value) {
  if (!value || Number.isNaN(value)) return "";
  return `background: rgba(var(--${value > 0 ? "good" : "bad"}), ${Math.min(0.35, Math.abs(value) * 0.35).toFixed(3)})`;
}
