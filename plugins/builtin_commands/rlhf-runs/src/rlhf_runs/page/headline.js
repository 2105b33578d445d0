// The first row of the page: what was trained, how far, the figure that matters, warnings. Of several runs: a table, by group.
const ENDS = 5, RECENT = 11;
const UNGROUPED = "no group", SURE = " (95\u00a0%)";

const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const isEvaluation = (name) => name.startsWith("eval/");

// First and last value of a run's most telling metric; of one that is noisy, means of some steps.
function figure(run) {
  const [steps, values] = run.headline ? run.curves[run.headline] : [[], []];
  if (!values.length) return null;
  const count = isEvaluation(run.headline) ? 1 : Math.min(ENDS, Math.max(1, Math.floor(values.length / 2)));
  const first = average(values.slice(0, count)), last = average(values.slice(-count));
  const half = halves(run, run.headline) ?? [];
  return { name: run.headline, first, last, count, from: steps[0], to: steps.at(-1), several: values.length > 1, halves: [half.at(0) ?? null, half.at(-1) ?? null] };
}

// Half of the 95 % interval of a metric at each of its steps: 1.96 standard errors, null where there are none.
function halves(run, name) {
  const errors = run.curves[`${name.replace(/\/mean$/, "")}/stderr`];
  if (!errors) return null;
  const at = new Map(errors[0].map((step, place) => [step, errors[1][place]]));
  return run.curves[name][0].map((step) => (typeof at.get(step) === "number" ? 1.96 * at.get(step) : null));
}

const rounded = (half) => Number(half.toPrecision(2));

function change(found) {
  if (!found.several) return `measured once, at step ${found.from}`;
  const gain = found.last - found.first, [before, after] = found.halves;
  const way = gain === 0 ? "unchanged since" : `${gain > 0 ? "up" : "down"} ${number(Math.abs(gain))} from ${number(found.first)} at`;
  const over = found.count > 1 ? `; means of ${found.count} steps` : "";
  const noise = before !== null && after !== null && Math.abs(gain) < Math.hypot(before, after);
  return `${way} step ${found.from}${over}${noise ? "; that is within the noise of the evaluation" : ""}`;
}

function interval(found) {
  const half = found.halves[1];
  return half ? ` ± ${rounded(half)}${SURE}` : "";
}

function progress(run) {
  const walls = Object.values(run.times).filter(Number.isFinite), about = run.about;
  const began = about.started ?? walls[0], last = about.ended ?? walls.at(-1);
  const took = began && last ? ` in ${duration(last - began)}` : "";
  if (run.status === "running") {
    const late = walls.slice(-RECENT), each = late.length > 1 ? (late.at(-1) - late[0]) / (late.length - 1) : 0;
    const left = run.steps ? each * (run.steps - run.step) : 0;
    return left ? `running; about ${duration(left)} left` : "running";
  }
  const words = { finished: `finished${took}`, failed: `failed after ${took.slice(4) || "an unknown time"}`, interrupted: `interrupted after ${took.slice(4)}` };
  return words[run.status] ?? (run.status === "killed" ? "killed: it could write nothing at its end" : run.status);
}

function headline(holder) {
  holder.replaceChildren(...(runs.length === 1 ? oneRun(runs[0]) : severalRuns()));
  for (const run of runs) {
    const said = [...(run.about.error ? [run.about.error] : []), ...run.warnings];
    for (const text of said) holder.append(element("p", { className: "warning" }, runs.length > 1 ? element("b", { textContent: `${run.name}: ` }) : null, text));
  }
}

function card(title, main, ...rest) {
  return element("div", { className: "card" }, element("h2", { textContent: title }), element("div", { className: "main" }, main), rest.filter(Boolean).map((part) => element("p", {}, part)));
}

function oneRun(run) {
  const found = figure(run), { model, data, ...how } = run.what;
  const bar = run.steps ? element("progress", { value: run.step, max: run.steps, attributes: { "aria-label": "steps done" } }) : null;
  const count = run.warnings.length + (run.about.error ? 1 : 0);
  const began = run.about.started ? `Began ${moment(run.about.started)}` : "";
  const method = Object.entries(how).map(([kind, names]) => `${kind} ${names}`).join(", ");
  const warned = run.about.error ? "It ended with an error; see below." : count ? "See below." : "Nothing looked wrong in its metrics.";
  const cards = [
    card("What was trained", breakable(model), ["on ", ...breakable(data)], breakable(method)),
    card("How far", `Step ${run.step}${run.steps ? ` of ${run.steps}` : ""}`, bar, progress(run), began),
    found ? card("The figure that matters", [`${number(found.last)}`, element("small", { textContent: interval(found) })], breakable(found.name), run.beside && element("b", { className: "lost", textContent: run.beside }), change(found), run.metrics[found.name].help) : card("The figure that matters", "None yet", "It appears with the first evaluation or step."),
    card("Warnings", String(count), warned),
  ];
  cards[3].classList.toggle("bad", count > 0);
  return [element("section", { id: "headline", className: "cards", attributes: { "aria-label": "summary" } }, cards), run.note ? element("p", { id: "note" }, element("b", { textContent: "Note: " }), run.note) : null, ...run.time.map((line) => element("p", { className: "time" }, line))].filter(Boolean);
}

// Groups of runs

function differing() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const apart = names.filter((name) => !UNTOLD.has(name) && new Set(runs.map((run) => run.settings[name]?.value ?? "")).size > 1);
  // A default of a plugin that only some runs have says no more than its name.
  return apart.filter((name) => runs.every((run) => run.settings[name]) || runs.some((run) => run.settings[name]?.changed));
}

const UNTOLD = new Set(["name", "run_dir"]);
const groupOf = (run) => (chosen.group ? run.settings[chosen.group]?.value || "none" : UNGROUPED);

function groups() {
  const found = new Map();
  runs.forEach((run, place) => found.set(groupOf(run), [...(found.get(groupOf(run)) ?? []), place]));
  return found;
}

function colourOf(place) {
  const at = chosen.group ? [...groups().keys()].indexOf(groupOf(runs[place])) : place;
  return COLORS[at % COLORS.length];
}

function severalRuns() {
  const apart = differing(), columns = apart.slice(0, 4), notes = runs.some((run) => run.note);
  const names = ["run", "status", "step", "figure", ...columns, ...(notes ? ["note"] : [])];
  const rows = [];
  for (const [group, places] of groups()) {
    if (chosen.group) {
      const lasts = places.map((place) => figure(runs[place])?.last).filter(Number.isFinite);
      const mean = lasts.length ? `mean of the figures ${number(average(lasts))}` : "";
      rows.push({ className: "group", cells: [[swatch(colourOf(places[0])), `${chosen.group} ${group}: ${counted(places.length, "run")}${mean ? `, ${mean}` : ""}`]] });
    }
    for (const place of places) {
      const run = runs[place], found = figure(run);
      const box = element("input", { type: "checkbox", checked: !chosen.hidden.has(place) });
      box.onchange = () => { chosen.hidden[box.checked ? "delete" : "add"](place); redraw(); };
      const told = found ? [breakable(found.name), element("b", { textContent: ` ${number(found.last)}` }), interval(found), run.beside && element("b", { className: "lost", textContent: ` ${run.beside}` }), element("small", { textContent: change(found) })] : "";
      rows.push([element("label", {}, box, swatch(colourOf(place)), breakable(run.name)), run.status, `${run.step}${run.steps ? ` of ${run.steps}` : ""}`, told, ...columns.map((name) => run.settings[name]?.value ?? ""), ...(notes ? [run.note] : [])]);
    }
  }
  const by = element("select", { id: "by" }, ["", ...apart].map((name) => element("option", { value: name, textContent: name || "nothing", selected: name === chosen.group })));
  by.onchange = () => go({ group: by.value });
  const more = apart.length > columns.length ? element("a", { href: address({ tab: "Settings" }), textContent: `${counted(apart.length, "setting")} differ` }) : null;
  return [element("div", { className: "bar" }, element("label", {}, "group by", by), more), table("runs", names, rows)];
}
