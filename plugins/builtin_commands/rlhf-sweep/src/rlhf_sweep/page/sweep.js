// A sweep: what is compared above the curves. A run of this page is a combination of settings, its curves are means over seeds.
const DRAWN = 8;
delete TABS.Answers;
delete TABS.Environment;
let begun = false;

function headline(holder) {
  const told = runs[0].sweep;
  if (!begun) runs.forEach((run, place) => { if (place >= DRAWN) chosen.hidden.add(place); });
  begun = true;
  const parts = told.verdict.map((text, place) => element("p", {}, place ? text : element("b", { textContent: text })));
  const rows = told.rows.map((row) => {
    const box = row.curve === null ? null : element("input", { type: "checkbox", checked: !chosen.hidden.has(row.curve), attributes: { "aria-label": "show its curves" } });
    if (box) box.onchange = () => { chosen.hidden[box.checked ? "delete" : "add"](row.curve); redraw(); };
    const [first, ...rest] = row.cells.length ? row.cells : ["all runs"];
    const name = element("label", {}, box, box ? swatch(colourOf(row.curve)) : null, breakable(first));
    return [name, ...rest, row.finished, element("b", { textContent: row.mean }), row.values];
  });
  const columns = [...(told.names.length ? told.names : ["settings"]), "finished", "mean ± s.e.", "each seed"];
  holder.replaceChildren(
    element("section", { id: "headline", attributes: { "aria-label": "results" } }, parts),
    element("p", { className: "dim", textContent: told.by ? `By ${told.by}. Lines below are means over seeds, bands 1.96 standard errors either way; values behind ± are standard errors here.` : "" }),
    table("results", columns, rows),
  );
  if (told.effects.length) {
    holder.append(element("h2", { textContent: "Which settings matter" }), element("p", { className: "dim", textContent: "Share of the variance between all runs that goes with a setting, and what noise alone would give." }), table("effects", ["setting", "explains", "noise alone", "means"], told.effects));
  }
  for (const [name, error] of told.failed) holder.append(element("p", { className: "warning" }, element("b", { textContent: `${name} failed: ` }), error));
  for (const run of runs) for (const text of run.warnings) holder.append(element("p", { className: "dim" }, element("b", { textContent: `${run.name}: ` }), text));
  if (told.left) holder.append(element("p", { className: "dim", textContent: `${counted(told.left, "run")} had not ended when this page was written.` }));
}
