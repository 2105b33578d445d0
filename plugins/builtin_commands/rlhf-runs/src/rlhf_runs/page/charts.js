// Metrics by the question that they answer, each as a chart; what says nothing is folded.
let plots = false, drawn = [];

function smoothed(values, weight) {
  let mean = 0, whole = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    whole = weight * whole + (1 - weight);
    return mean / whole;
  });
}

// Question → its metrics, in the order of the first run that has them.
function questions() {
  const found = new Map();
  for (const run of runs) {
    for (const [name, metric] of Object.entries(run.metrics)) {
      if (!found.has(metric.question)) found.set(metric.question, new Map());
      if (!found.get(metric.question).has(name)) found.get(metric.question).set(name, metric);
    }
  }
  return found;
}

const having = (name) => runs.filter((run) => Object.hasOwn(run.curves, name));

// Why a chart of a metric would say nothing; empty for one that says something. `before` has the charts before it.
function silence(name, before) {
  const curves = having(name).map((run) => run.curves[name]);
  const first = curves[0][1][0];
  if (curves.every(([, values]) => values.every((value) => value === first))) {
    return curves.every(([steps]) => steps.length === 1) ? `${number(first)}, measured once` : `${number(first)} at every step`;
  }
  if (curves.every(([steps]) => steps.length === 1) && curves.length === 1) return `${number(first)}, measured once`;
  const content = JSON.stringify(runs.map((run) => run.curves[name] ?? null));
  const same = before.get(content);
  if (same) return `the same values as ${same}`;
  before.set(content, name);
  return "";
}

function metricsTab(main) {
  const top = element("div"), list = element("div", { id: "metrics" });
  const smooth = element("input", { id: "smooth", type: "range", min: 0, max: 0.98, step: 0.02, value: chosen.smooth });
  smooth.oninput = () => { chosen.smooth = Number(smooth.value); redraw(); };
  const axis = element("select", { id: "axis" }, ["step", "minutes"].map((name) => element("option", { textContent: name, selected: name === chosen.axis })));
  axis.onchange = () => { chosen.axis = axis.value; redraw(); };
  const filter = element("input", { id: "filter", type: "search", placeholder: "name or word", value: chosen.filter });
  filter.oninput = () => { chosen.filter = filter.value.trim().toLowerCase(); fill(); };
  const bar = element("div", { className: "bar" }, element("label", {}, "find a metric", filter), element("label", {}, "smoothing", smooth), element("label", {}, "over", axis), stepChip());
  const fill = () => {
    const opened = new Set([...list.querySelectorAll("details[open]")].map((each) => each.dataset.key));
    forget();
    list.replaceChildren(...questionParts(opened));
    if (!list.children.length) list.append(element("p", { className: "dim", textContent: chosen.filter ? "No metric has this in its name or its help." : "No metrics yet." }));
    for (const plot of list.querySelectorAll(".plot")) seen.observe(plot);
  };
  const known = () => JSON.stringify(runs.map((run) => [Object.keys(run.curves), run.places]));
  headline(top);
  main.append(top, bar, list);
  fill();
  let before = known();
  renew = () => {
    headline(top);
    if (before === (before = known())) redraw();
    else fill();
  };
}

function questionParts(opened) {
  const sections = [], before = new Map(), says = "What does it say?", found = questions();
  if (!chosen.filter && !found.has(says) && runs.some((run) => run.places.length)) found.set(says, new Map());
  for (const [question, metrics] of found) {
    const groups = { first: [], more: [], silent: [] };
    for (const [name, metric] of metrics) {
      if (chosen.filter && !`${name} ${metric.help}`.toLowerCase().includes(chosen.filter)) continue;
      const why = silence(name, before);
      if (why) groups.silent.push([breakable(name), breakable(why), metric.help]);
      else groups[metric.first || question === "What else was measured?" ? "first" : "more"].push([name, metric]);
    }
    const section = element("section", {}, element("h2", { className: "question", textContent: question }));
    const folded = (key, title, ...inside) => element("details", { open: Boolean(chosen.filter) || opened.has(question + key), data: { key: question + key } }, element("summary", { textContent: title }), inside);
    const grid = (names) => element("div", { className: "plots" }, names.map(([name, metric]) => chartOf(name, metric)));
    if (groups.first.length) section.append(grid(groups.first));
    if (question === says && !chosen.filter) section.append(preview());
    if (groups.more.length) section.append(folded("more", `${groups.more.length} more`, grid(groups.more)));
    if (groups.silent.length) section.append(folded("silent", `${groups.silent.length} without a chart: the same at every step, or the same as another metric`, table("", ["metric", "value", "meaning"], groups.silent)));
    if (section.children.length > 1) sections.push(section);
  }
  return sections;
}

function chartOf(name, metric) {
  const title = element("h3", {}, breakable(name)), unit = metric.unit ? element("span", { className: "unit", textContent: metric.unit }) : null;
  const plot = element("div", { className: "plot", data: { metric: name }, attributes: { role: "group" } });
  const made = element("figure", { className: "chart" }, element("figcaption", {}, element("div", { className: "title" }, title, unit), element("p", { className: "value" }), element("p", { textContent: metric.help })), plot);
  tell(plot);
  return made;
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting || !plots) continue;
    seen.unobserve(entry.target);
    drawn.push(entry.target);
    draw(entry.target);
    entry.target.on("plotly_click", (event) => go({ step: event.points[0].customdata }));
  }
}, { rootMargin: "300px" });

function forget() {
  seen.disconnect();
  for (const plot of drawn) if (plots) Plotly.purge(plot);
  drawn = [];
}

function redraw() {
  for (const plot of drawn) draw(plot);
}

// Of a group of runs: the mean at the steps that all have.
function meanCurve(curves) {
  const maps = curves.map(([steps, values]) => new Map(steps.map((step, place) => [step, values[place]])));
  const steps = curves[0][0].filter((step) => maps.every((map) => map.has(step)));
  return [steps, steps.map((step) => average(maps.map((map) => map.get(step))))];
}

function tracesOf(name) {
  const traces = [], smooth = isEvaluation(name) ? 0 : chosen.smooth; // each evaluation is a figure of its own
  const line = (run, [steps, values], colour, width, more = {}) => {
    const began = run.times[steps[0]], x = chosen.axis === "step" ? steps : steps.map((step) => (run.times[step] - began) / 60);
    traces.push({ x, y: values, customdata: steps, mode: isEvaluation(name) || (steps.length < 40 && width > 1) ? "lines+markers" : "lines", marker: { size: 4 }, name: run.name, hovertemplate: "%{y:.4~g}", line: { color: colour, width }, ...more });
  };
  const faint = { opacity: 0.35, hoverinfo: "skip", hovertemplate: null };
  for (const [group, places] of groups()) {
    const shownHere = places.filter((place) => !chosen.hidden.has(place) && Object.hasOwn(runs[place].curves, name));
    const several = chosen.group && shownHere.length > 1 && chosen.axis === "step";
    for (const place of shownHere) {
      const run = runs[place], curve = run.curves[name], colour = colourOf(place);
      if (several) line(run, curve, colour, 1, faint);
      else {
        if (smooth) line(run, curve, colour, 1, faint);
        line(run, [curve[0], smooth ? smoothed(curve[1], smooth) : curve[1]], colour, 1.8);
      }
    }
    if (!several) continue;
    const [steps, values] = meanCurve(shownHere.map((place) => runs[place].curves[name]));
    line({ name: `${chosen.group} ${group}, mean`, times: {} }, [steps, smooth ? smoothed(values, smooth) : values], colourOf(shownHere[0]), 2.2);
  }
  return traces;
}

function draw(plot) {
  const name = plot.dataset.metric, style = getComputedStyle(document.documentElement), { step } = shown();
  const [text, line, accent, soft] = ["--dim", "--line", "--accent", "--soft"].map((key) => style.getPropertyValue(key).trim());
  const marked = step !== null && chosen.axis === "step" ? [{ type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: accent, width: 1, dash: "dot" } }] : [];
  const layout = {
    margin: { l: 46, r: 10, t: 8, b: 26 }, shapes: marked,
    showlegend: false, hovermode: "x unified", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: text, size: 11 },
    xaxis: { gridcolor: line, zeroline: false, nticks: 6 }, yaxis: { gridcolor: line, zeroline: false, nticks: 5, exponentformat: "e" },
    hoverlabel: { bgcolor: soft },
  };
  Plotly.react(plot, tracesOf(name), layout, { displayModeBar: false, responsive: true });
  tell(plot);
}

function tell(plot) {
  const { metric } = plot.dataset, value = told(metric, shown().step);
  plot.setAttribute("aria-label", `${metric}: ${value}`);
  plot.parentNode.querySelector(".value").textContent = value;
}

// The values above a chart: of one run from its first to its last, of several their last ones or the range of those.
function told(name, step) {
  const each = having(name).filter((run) => !chosen.hidden.has(runs.indexOf(run))).map((run) => {
    const [steps, values] = run.curves[name], at = step === null ? values.length - 1 : steps.indexOf(step);
    return { whose: run.name, value: values[at], from: step === null && values.length > 1 ? `${number(values[0])} → ` : "" };
  }).filter(({ value }) => value !== undefined);
  if (!each.length) return step === null ? "" : `not measured at step ${step}`;
  const at = step === null ? "" : `step ${step}: `;
  if (runs.length === 1) return `${at}${each[0].from}${number(each[0].value)}`;
  if (each.length <= 3) return at + each.map(({ whose, value }) => `${whose} ${number(value)}`).join(", ");
  const sorted = each.sort((a, b) => a.value - b.value), ends = [sorted[0], sorted.at(-1)];
  if (number(ends[0].value) === number(ends[1].value)) return at + number(ends[0].value);
  return at + ends.map(({ whose, value }) => `${number(value)} (${whose})`).join(" to ");
}

function stepChip() {
  const { step } = shown();
  if (step === null) return element("span", { className: "dim", textContent: "A click on a chart chooses a step." });
  const clear = element("button", { type: "button", id: "nostep", textContent: "all steps" });
  clear.onclick = () => go({ step: null, split: null });
  return element("span", { id: "step", className: "chip" }, element("b", { textContent: `Step ${step}` }), clear);
}
