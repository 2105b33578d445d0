"use strict";
const COLORS = ["#2f6fde", "#e0713a", "#2c9c6a", "#b4489c", "#8a8f2a", "#5c60c8", "#c2454b", "#3a98a8"];
const GROUPS_SHOWN = 200;
const LIVE_MS = 2000;
let runs = [], telling = [], plots = false, drawn = [], stamp = "", renew = () => {};
const chosen = { smooth: 0, axis: "step", filter: "", hidden: new Set(), run: 0, place: null, order: "drawn", group: 0, colour: "advantage" };

function element(tag, properties = {}, ...children) {
  const { data, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, data || {});
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

async function chunk(id) {
  const here = document.getElementById(id);
  if (here) return unpack(Uint8Array.from(atob(here.textContent), (letter) => letter.charCodeAt(0)));
  const answer = await fetch(`chunk/${id}`);
  if (!answer.ok) throw new Error((await answer.json()).error?.message ?? answer.status);
  stamp = answer.headers.get("ETag") ?? stamp;
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
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

// Tabs

const TABS = { Curves: curves, Answers: answers, Settings: settings, Environment: environment };

function show(tab) {
  for (const button of document.getElementById("tabs").children) {
    button.setAttribute("aria-selected", String(button.textContent === tab));
  }
  forget();
  renew = () => {};
  const main = document.getElementById("main");
  main.replaceChildren();
  TABS[tab](main);
}

function overview(holder) {
  const head = element("tr", {}, ["run", "status", "step", "figure", "began", "draws"].map((name) => element("th", { textContent: name })));
  const rows = runs.map((run, place) => {
    const [steps, values] = run.headline ? run.curves[run.headline] : [[], []], last = values.length - 1;
    const figure = last < 0 ? "" : `${run.headline} ${last ? `${number(values[0])} → ` : ""}${number(values[last])} (step ${steps[last]})`;
    const began = run.about.started ? new Date(run.about.started * 1000).toLocaleString() : "";
    const draws = Object.entries(run.draws).map(([outcome, count]) => `${count.toLocaleString("en")} ${outcome}`).join(", ");
    const swatch = element("span", { textContent: "● ", style: `color: ${COLORS[place % COLORS.length]}` });
    const cells = [run.status, `${run.step}${run.steps ? ` of ${run.steps}` : ""}`, figure, began, draws];
    return element("tr", {}, element("td", {}, swatch, run.name), cells.map((text) => element("td", { textContent: text })));
  });
  holder.replaceChildren(element("div", { className: "wide" }, element("table", { id: "overview" }, head, rows)));
  for (const run of runs) {
    const said = [...(run.about.error ? [run.about.error] : []), ...run.warnings];
    for (const text of said) holder.append(element("p", { className: "warning", textContent: runs.length > 1 ? `${run.name}: ${text}` : text }));
  }
}

// Curves

function smoothed(values, weight) {
  let mean = 0, whole = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    whole = weight * whole + (1 - weight);
    return mean / whole;
  });
}

function metrics() {
  const known = new Set(runs.flatMap((run) => Object.keys(run.curves)));
  const headlines = runs.map((run) => run.headline).filter(Boolean);
  const first = [...new Set([...headlines, ...telling])].filter((name) => known.has(name));
  const rest = [...known].filter((name) => !first.includes(name)).sort();
  return { first, rest };
}

function curves(main) {
  const top = element("div");
  overview(top);
  const redraw = () => { for (const plot of drawn) draw(plot); };
  const smooth = element("input", { id: "smooth", type: "range", min: 0, max: 0.98, step: 0.02, value: chosen.smooth });
  smooth.oninput = () => { chosen.smooth = Number(smooth.value); redraw(); };
  const axis = element("select", { id: "axis" }, ["step", "minutes"].map((name) => element("option", { textContent: name, selected: name === chosen.axis })));
  axis.onchange = () => { chosen.axis = axis.value; redraw(); };
  const filter = element("input", { id: "filter", type: "search", placeholder: "metric", value: chosen.filter });
  const bar = element("div", { className: "bar" }, element("label", {}, "smoothing", smooth), element("label", {}, "over", axis), filter);
  runs.forEach((run, place) => {
    if (runs.length === 1) return;
    const box = element("input", { type: "checkbox", checked: !chosen.hidden.has(place) });
    box.onchange = () => { chosen.hidden[box.checked ? "delete" : "add"](place); redraw(); };
    bar.append(element("label", {}, box, element("span", { textContent: run.name, style: `color: ${COLORS[place % COLORS.length]}` })));
  });
  const list = element("div", { id: "plots" });
  const fill = () => {
    forget();
    const { first, rest } = metrics();
    const wanted = (name) => name.includes(chosen.filter);
    const grid = (names) => element("div", { className: "plots" }, names.map((name) => element("div", { className: "plot", data: { metric: name } })));
    list.replaceChildren(grid(first.filter(wanted)));
    const groups = new Map();
    for (const name of rest.filter(wanted)) {
      const group = name.includes("/") ? name.split("/")[0] : "others";
      groups.set(group, [...(groups.get(group) || []), name]);
    }
    for (const [group, names] of groups) {
      const details = element("details", { open: Boolean(chosen.filter) }, element("summary", { textContent: `${group} (${names.length})` }), grid(names));
      list.append(details);
    }
    if (!first.length && !rest.length) list.append(element("p", { className: "dim", textContent: "No metrics yet." }));
    for (const plot of list.querySelectorAll(".plot")) seen.observe(plot);
  };
  filter.oninput = () => { chosen.filter = filter.value.trim(); fill(); };
  main.append(top, bar, list);
  fill();
  let known = JSON.stringify(metrics());
  renew = () => {
    overview(top);
    if (known === (known = JSON.stringify(metrics()))) redraw();
    else fill();
  };
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting || !plots) continue;
    seen.unobserve(entry.target);
    drawn.push(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "200px" });

function forget() {
  seen.disconnect();
  for (const plot of drawn) if (plots) Plotly.purge(plot);
  drawn = [];
}

function draw(plot) {
  const name = plot.dataset.metric, style = getComputedStyle(document.documentElement);
  const [text, line] = ["--text", "--line"].map((key) => style.getPropertyValue(key));
  const traces = [];
  runs.forEach((run, place) => {
    if (!Object.hasOwn(run.curves, name) || chosen.hidden.has(place)) return;
    const [steps, values] = run.curves[name], began = run.times[steps[0]];
    const x = chosen.axis === "step" ? steps : steps.map((step) => (run.times[step] - began) / 60);
    const colour = COLORS[place % COLORS.length], mode = steps.length < 40 ? "lines+markers" : "lines";
    const common = { x, mode, name: run.name, marker: { size: 4 }, hovertemplate: "%{y:.6~g}" };
    if (chosen.smooth) traces.push({ ...common, y: values, line: { color: colour, width: 1 }, opacity: 0.25, hoverinfo: "skip", hovertemplate: null, mode: "lines" });
    traces.push({ ...common, y: chosen.smooth ? smoothed(values, chosen.smooth) : values, line: { color: colour, width: 1.8 } });
  });
  const layout = {
    title: { text: name, font: { size: 13 }, x: 0.03, y: 0.95 },
    margin: { l: 48, r: 12, t: 30, b: 28 },
    showlegend: false, hovermode: "x unified",
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: text.trim(), size: 11 },
    xaxis: { gridcolor: line.trim(), zeroline: false }, yaxis: { gridcolor: line.trim(), zeroline: false },
    hoverlabel: { bgcolor: style.getPropertyValue("--soft").trim() },
  };
  Plotly.react(plot, traces, layout, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] });
}

// Answers

async function answers(main) {
  const run = runs[chosen.run];
  const whose = element("select", { id: "run" }, runs.map((each, place) => element("option", { value: place, textContent: each.name, selected: place === chosen.run })));
  whose.onchange = () => { Object.assign(chosen, { run: Number(whose.value), place: null, group: 0 }); show("Answers"); };
  if (!run.places.length) {
    main.append(element("div", { className: "bar" }, runs.length > 1 ? whose : null), element("p", { className: "dim", textContent: "No answers were saved." }));
    renew = () => { if (runs[chosen.run].places.length) show("Answers"); };
    return;
  }
  if (chosen.place === null) chosen.place = run.places.length - 1;
  const [split, step] = run.places[chosen.place];
  const where = element("select", { id: "place" });
  const places = () => where.replaceChildren(...runs[chosen.run].places.map(([kind, at], place) => element("option", { value: place, textContent: `${kind}, step ${at}`, selected: place === chosen.place })));
  places();
  renew = () => {
    chosen.place = runs[chosen.run].places.findIndex(([kind, at]) => kind === split && at === step);
    places();
  };
  where.onchange = () => { Object.assign(chosen, { place: Number(where.value), group: 0 }); show("Answers"); };
  const ORDERS = { drawn: () => 0, "highest reward": (a, b) => mean(b) - mean(a), "lowest reward": (a, b) => mean(a) - mean(b), "largest spread": (a, b) => spread(b) - spread(a) };
  const order = element("select", { id: "order" }, Object.keys(ORDERS).map((name) => element("option", { textContent: name, selected: name === chosen.order })));
  order.onchange = () => { Object.assign(chosen, { order: order.value, group: 0 }); show("Answers"); };
  const find = element("input", { id: "find", type: "search", placeholder: "text" });
  const colour = element("select", { id: "colour" }, ["advantage", "log-probability", "mismatch", "version", "nothing"].map((name) => element("option", { textContent: name, selected: name === chosen.colour })));
  main.append(element("div", { className: "bar" }, runs.length > 1 ? whose : null, where, element("label", {}, "order", order), find, element("label", {}, "colour", colour)));
  if (run.left_out.length) main.append(element("p", { className: "dim", textContent: `Left out, as the page would be too large: ${run.left_out.join(", ")}` }));
  const list = element("div", { className: "list", id: "groups" }), detail = element("div", { id: "group" });
  main.append(element("div", { className: "browser" }, list, detail));
  let groups;
  try {
    groups = (await chunk(`run${chosen.run}-${split}-${step}`)).sort(ORDERS[chosen.order]);
  } catch (error) {
    detail.append(element("p", { className: "warning", textContent: error.message }));
    return;
  }
  let most = GROUPS_SHOWN;
  const open = (place) => {
    chosen.group = place;
    for (const button of list.querySelectorAll("button[data-place]")) button.setAttribute("aria-selected", String(Number(button.dataset.place) === place));
    detail.replaceChildren(...(groups[place] ? group(groups[place]) : [element("p", { className: "dim", textContent: "Nothing found." })]));
  };
  const fill = () => {
    const words = find.value.trim().toLowerCase();
    const found = groups.map((each, place) => [each, place]).filter(([each]) => !words || JSON.stringify(each, (name, value) => (name === "uri" ? undefined : value)).toLowerCase().includes(words));
    list.replaceChildren(...found.slice(0, most).map(([each, place]) => {
      const button = element("button", { type: "button", data: { place } }, element("small", { textContent: `${number(mean(each))} ± ${number(spread(each))}  ` }), flat(each.prompt));
      button.onclick = () => open(place);
      return button;
    }));
    if (found.length > most) {
      const more = element("button", { type: "button", textContent: `${found.length - most} more` });
      more.onclick = () => { most += GROUPS_SHOWN; fill(); };
      list.append(more);
    }
    open(found.some(([, place]) => place === chosen.group) ? chosen.group : found.length ? found[0][1] : -1);
  };
  find.oninput = fill;
  colour.onchange = () => { chosen.colour = colour.value; open(chosen.group); };
  fill();
}

const judged = (each) => each.rows.map((row) => row.reward).filter((reward) => typeof reward === "number");
function mean(each) { const all = judged(each); return all.length ? all.reduce((sum, one) => sum + one, 0) / all.length : NaN; }
function spread(each) { const all = judged(each), middle = mean(each); return all.length ? Math.sqrt(all.reduce((sum, one) => sum + (one - middle) ** 2, 0) / all.length) : NaN; }
const flat = (text) => (typeof text === "string" ? text : JSON.stringify(text) || "").replace(/\s+/g, " ").slice(-120);

function group(each) {
  const parts = [element("h2", { textContent: `${each.source ?? "task"} ${each.task ?? ""}` })];
  parts.push(element("div", { className: "text" }, each.seen ? pictured(each.seen) : typeof each.prompt === "string" ? each.prompt : JSON.stringify(each.prompt, null, 1)));
  if (each.label !== null && each.label !== undefined) parts.push(element("p", { className: "dim", textContent: `label ${typeof each.label === "string" ? each.label : JSON.stringify(each.label)}` }));
  const scale = Math.max(1e-9, ...each.rows.flatMap((row) => [Math.abs(row.advantage || 0), ...(row.segments || []).flatMap((part) => (part.advantages || []).map(Math.abs))]));
  return [...parts, ...each.rows.map((row) => answer(row, scale))];
}

function pictured(seen) {
  return seen.map((part) => {
    if (typeof part === "string") return part;
    const name = `[picture ${part.picture}]`, title = `${part.width}×${part.height} pixels, ${part.file}`;
    return element("span", { className: "picture", title }, part.uri ? element("img", { src: part.uri, alt: name }) : null, element("small", { textContent: `${name} ${part.width}×${part.height}` }));
  });
}

function answer(row, scale) {
  const said = [row.reward === undefined ? `unjudged: ${row.unjudged || ""}` : `reward ${number(row.reward)}`];
  const rewards = Object.entries(row.rewards || {});
  if (rewards.length) said.push(rewards.map(([name, value]) => `${name} ${value === null ? "-" : number(value)}`).join(", "));
  if (row.score !== undefined) said.push(`score ${number(row.score)}`);
  if (row.advantage !== undefined) said.push(`advantage ${number(row.advantage)}`);
  said.push([`${row.length ?? 0} tokens`, row.finish_reason].filter(Boolean).join(", "));
  if (row.role) said.push(`role ${row.role}`);
  if (row.final === false) said.push("not judged by itself");
  const branch = row.tree && row.tree.parent !== null && row.tree.parent !== undefined;
  if (branch) said.push(`row ${row.tree.row}, from row ${row.tree.parent} behind its first ${row.tree.branch} tokens`);
  const made = element("div", { className: branch ? "row branch" : "row" }, element("div", { className: "dim", textContent: said.join("  ·  ") }));
  if (!row.segments) made.append(element("div", { className: "text", style: tint(chosen.colour === "advantage" ? row.advantage / scale : 0) }, row.seen ? pictured(row.seen) : row.text || ""));
  for (const part of row.segments || []) {
    const text = element("div", { className: part.kind === "action" ? "text" : "text seen" });
    if (part.kind === "action" && part.tokens) part.tokens.forEach((token, place) => text.append(mark(token, part, place, row, scale)));
    else if (part.seen) text.append(...pictured(part.seen));
    else text.textContent = part.text ?? (part.tokens || []).join("") ?? "";
    made.append(text);
  }
  if (row.segments && !row.segments.some((part) => part.tokens || part.text || part.seen)) made.append(element("div", { className: "text", textContent: row.text || "" }));
  if (row.events) made.append(element("details", {}, element("summary", { textContent: `${row.events.length} events` }), element("div", { className: "text", textContent: row.events.map((event) => JSON.stringify(event)).join("\n") })));
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
  return `background: rgba(var(--${value > 0 ? "good" : "bad"}), ${Math.min(0.6, Math.abs(value) * 0.6).toFixed(3)})`;
}

// Settings and environment

function settings(main) {
  const changed = new Set(runs.flatMap((run) => run.changed));
  const every = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const all = element("input", { type: "checkbox" });
  const holder = element("div", { className: "wide" });
  const fill = () => {
    const head = element("tr", {}, ["setting", ...runs.map((run) => run.name)].map((name) => element("th", { textContent: name })));
    const written = (value) => (value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value, (_, part) => part ?? undefined) ?? "none");
    const rows = every.filter((name) => all.checked || changed.has(name)).map((name) => {
      const values = runs.map((run) => written(run.settings[name])), differ = values.some((value) => value !== values[0]);
      return element("tr", { style: differ ? "font-weight: 600" : "" }, element("td", { textContent: name }), values.map((value) => element("td", { textContent: value })));
    });
    holder.replaceChildren(element("table", { id: "settings" }, head, rows));
  };
  all.onchange = fill;
  main.append(element("div", { className: "bar" }, element("label", {}, all, "also those at their defaults")), holder);
  fill();
}

function environment(main) {
  for (const run of runs) {
    main.append(element("h2", { textContent: run.name }));
    const about = Object.entries({ directory: run.path, ...run.about }).filter(([name]) => !["started", "ended"].includes(name));
    main.append(element("table", {}, about.map(([name, value]) => element("tr", {}, element("th", { textContent: name }), element("td", { textContent: typeof value === "string" ? value : JSON.stringify(value) })))));
    const names = ["kind", "alias", "name", "distribution", "version"];
    const head = element("tr", {}, names.map((name) => element("th", { textContent: name })));
    const rows = run.plugins.map((plugin) => element("tr", {}, names.map((name) => element("td", { textContent: plugin[name] ?? "" }))));
    main.append(element("h2", { textContent: "Plugins" }), element("div", { className: "wide" }, element("table", {}, head, rows)));
    main.append(element("details", {}, element("summary", { textContent: "Packages" }), element("div", { className: "text", textContent: run.requirements })));
  }
}

// Runs that go on

async function follow() {
  const began = performance.now(), state = document.getElementById("live");
  if (!document.hidden) {
    try {
      const answer = await fetch(`chunk/head?seen=${stamp}`);
      if (!answer.ok) throw new Error(answer.status);
      state.textContent = "live";
      if (answer.status === 200) {
        const found = await unpack(await answer.arrayBuffer());
        [runs, stamp] = [found, answer.headers.get("ETag")];
        renew();
      }
    } catch {
      state.textContent = "rlhf view does not answer";
    }
  }
  setTimeout(follow, Math.max(LIVE_MS, 10 * (performance.now() - began)));
}

// Start

function theme(name) {
  document.documentElement.dataset.theme = name;
  for (const plot of drawn) draw(plot);
}

function plotsReady() {
  plots = true;
  for (const plot of document.querySelectorAll(".plot")) {
    seen.unobserve(plot); // or it would not be told again
    seen.observe(plot);
  }
}

theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
document.getElementById("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
const live = !document.getElementById("head");
Promise.all([chunk("head"), chunk("telling")]).then((found) => {
  [runs, telling] = found;
  for (const tab of Object.keys(TABS)) {
    const button = element("button", { type: "button", role: "tab", textContent: tab });
    button.onclick = () => show(tab);
    document.getElementById("tabs").append(button);
  }
  show("Curves");
  if (live) follow();
}).catch((error) => document.getElementById("main").replaceChildren(element("p", { className: "warning", textContent: error.message })));
