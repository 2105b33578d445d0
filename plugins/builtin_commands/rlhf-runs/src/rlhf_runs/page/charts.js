// Metrics by the question that they answer, each as a chart; what says nothing is folded.
let drawn = [];
const WHOLE_STEPS = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((first) => first * 10 ** power));
const DOTS = 40, NEAR_PX = 12, LINES = 12, DOUBLE_CLICK_MS = 250;

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
    const grid = (names) => element("div", { className: "plots", style: `--columns: ${Math.ceil(names.length / Math.ceil(names.length / 4))}` }, names.map(([name, metric]) => chartOf(name, metric)));
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
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    sizes.observe(target);
    drawn.push(target);
    draw(target);
  }
}, { rootMargin: "300px" });

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) target.chart?.setSize({ width: target.clientWidth, height: target.clientHeight });
});

function forget() {
  seen.disconnect();
  sizes.disconnect();
  for (const plot of drawn) plot.chart.destroy();
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

// The lines of a chart. Those without a name are faint: their values are told by another.
function tracesOf(name) {
  const traces = [], smooth = isEvaluation(name) ? 0 : chosen.smooth; // each evaluation is a figure of its own
  const line = (run, [steps, values], colour, width, more = {}) => {
    const began = run.times[steps[0]], x = chosen.axis === "step" ? steps : steps.map((step) => (run.times[step] - began) / 60);
    const y = values.map((value) => (typeof value === "number" ? value : null)); // NaN and infinities are texts
    traces.push({ x, y, steps, colour, width, name: run.name, dots: isEvaluation(name) || (steps.length < DOTS && width > 1), ...more });
  };
  const faint = { name: "", faint: true };
  for (const [group, places] of groups()) {
    const shownHere = places.filter((place) => !chosen.hidden.has(place) && Object.hasOwn(runs[place].curves, name));
    const several = chosen.group && shownHere.length > 1 && chosen.axis === "step";
    for (const place of shownHere) {
      const run = runs[place], curve = run.curves[name], colour = colourOf(place);
      if (several) line(run, curve, colour, 1, faint);
      else {
        if (smooth) line(run, curve, colour, 1, faint);
        line(run, [curve[0], smooth ? smoothed(curve[1], smooth) : curve[1]], colour, 1.8, { halves: halves(run, name) });
      }
    }
    if (!several) continue;
    const [steps, values] = meanCurve(shownHere.map((place) => runs[place].curves[name]));
    line({ name: `${chosen.group} ${group}, mean`, times: {} }, [steps, smooth ? smoothed(values, smooth) : values], colourOf(shownHere[0]), 2.2);
  }
  return traces;
}

// Draws a chart with uPlot, or draws it again. Bands are 95 % intervals.
function draw(plot) {
  const style = getComputedStyle(document.documentElement), { step } = shown();
  const [text, line, accent] = ["--dim", "--line", "--accent"].map((key) => style.getPropertyValue(key).trim());
  const series = [{}], bands = [], tables = [], named = new Map();
  for (const trace of tracesOf(plot.dataset.metric)) {
    if (trace.name) named.set(series.length, trace);
    series.push({ stroke: trace.colour, width: trace.width, alpha: trace.faint ? 0.35 : 1, points: { show: trace.dots, size: 5, fill: trace.colour } });
    tables.push([trace.x, trace.y]);
    if (!trace.halves?.some(Boolean)) continue;
    bands.push({ series: [series.length, series.length + 1], fill: `${trace.colour}30` });
    series.push(...[1, -1].map(() => ({ width: 0, points: { show: false } })));
    tables.push([trace.x, ...[1, -1].map((way) => trace.y.map((value, place) => (value === null ? null : value + way * (trace.halves[place] ?? 0))))]);
  }
  const overSteps = chosen.axis === "step", marked = overSteps ? step : null;
  const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
  const options = {
    width: plot.clientWidth, height: plot.clientHeight, padding: [8, 10, 0, 0], series, bands, legend: { show: false },
    scales: { x: { time: false } },
    axes: [{ ...axis, size: 24, space: 45, ...(overSteps ? { incrs: WHOLE_STEPS } : {}), values: ticks }, { ...axis, size: 50, space: 26, values: ticks }],
    cursor: { y: false, hover: { prox: NEAR_PX }, points: { size: (chart, place) => (named.has(place) ? 7 : 0) }, drag: matchMedia("(pointer: coarse)").matches ? { x: false, y: false } : { x: true, y: true, uni: 20, dist: 5 } },
    hooks: { drawClear: [(chart) => markStep(chart, marked, accent)], setCursor: [(chart) => hover(chart, tip, named)] },
  };
  plot.chart?.destroy();
  const tip = element("div", { className: "tip", hidden: true });
  plot.chart = new uPlot(options, tables.length ? uPlot.join(tables) : [[]], plot);
  plot.chart.over.append(tip);
  plot.marked = marked;
  chooseByClick(plot.chart, named);
  tell(plot);
}

function ticks(chart, values, axis, space, by) {
  return values.map((value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-3)) return Number(value.toPrecision(6)).toExponential();
    return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, Math.ceil(-Math.log10(by)) + 1) });
  });
}

// A line at the chosen step, below the curves.
function markStep({ ctx, bbox, valToPos }, step, colour) {
  if (step === null) return;
  const x = valToPos(step, "x", true);
  if (!(x >= bbox.left && x <= bbox.left + bbox.width)) return;
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

// The values beside the pointer.
function hover(chart, tip, named) {
  const { idxs, left } = chart.cursor;
  const near = [...named].filter(([place]) => left >= 0 && idxs[place] !== null && idxs[place] !== undefined);
  tip.hidden = !near.length;
  if (!near.length) return;
  const lines = near.map(([place, trace]) => {
    const half = trace.halves?.[trace.x.indexOf(chart.data[0][idxs[place]])];
    return element("div", {}, swatch(trace.colour), `${runs.length > 1 ? `${trace.name} ` : ""}${number(chart.data[place][idxs[place]])}${half ? ` ± ${rounded(half)}` : ""}`);
  });
  const at = chart.data[0][idxs[near[0][0]]];
  const more = lines.length > LINES ? [element("div", { textContent: `${lines.length - LINES} more` })] : [];
  tip.replaceChildren(element("b", { textContent: chosen.axis === "step" ? `step ${at}` : `${number(at)} minutes` }), ...lines.slice(0, LINES), ...more);
  tip.classList.toggle("before", left > chart.over.clientWidth / 2);
  tip.style.setProperty("--at", `${left}px`);
}

// A click chooses the step; a double click, by which uPlot shows the whole chart again, does not.
function chooseByClick(chart, named) {
  let waiting = 0;
  chart.over.addEventListener("click", () => {
    const [place, trace] = [...named].find(([each]) => chart.cursor.idxs[each] !== null && chart.cursor.idxs[each] !== undefined) ?? [];
    clearTimeout(waiting);
    if (!trace) return;
    const step = trace.steps[trace.x.indexOf(chart.data[0][chart.cursor.idxs[place]])];
    waiting = setTimeout(() => go({ step }), DOUBLE_CLICK_MS);
  });
  chart.over.addEventListener("dblclick", () => clearTimeout(waiting));
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
    const half = halves(run, name), text = (place) => `${number(values[place])}${half?.[place] ? ` ± ${rounded(half[place])}` : ""}`;
    return { whose: run.name, value: values[at], told: text(at), sure: half?.[at], from: step === null && values.length > 1 ? `${text(0)} → ` : "" };
  }).filter(({ value }) => value !== undefined);
  if (!each.length) return step === null ? "" : `not measured at step ${step}`;
  const at = step === null ? "" : `step ${step}: `, sure = each.some((one) => one.sure) ? SURE : "";
  if (runs.length === 1) return at + each[0].from + each[0].told + sure;
  if (each.length <= 3) return at + each.map(({ whose, told: text }) => `${whose} ${text}`).join(", ") + sure;
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
