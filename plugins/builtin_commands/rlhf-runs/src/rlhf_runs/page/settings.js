// Settings, with the changed ones first, and what the run ran on.

function settingsTab(main) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const apart = new Set(differing()), changed = new Set(names.filter((name) => runs.some((run) => run.settings[name]?.changed)));
  const rank = (name) => (apart.has(name) ? 0 : changed.has(name) ? 1 : 2);
  const rows = names.filter((name) => !UNTOLD.has(name)).sort((a, b) => rank(a) - rank(b)).map((name) => {
    const known = runs.find((run) => run.settings[name])?.settings[name], usual = known.usual ?? unset(known, "");
    const help = known.help ? element("small", { textContent: known.help }) : null;
    const values = runs.map((run) => (run.settings[name] ? breakable(run.settings[name].value ?? unset(run.settings[name])) : ""));
    return { rank: rank(name), className: rank(name) === 0 ? "differs" : "", cells: [[element("b", {}, breakable(name)), help].filter(Boolean), ...values, usual] };
  });
  const columns = ["setting", ...(runs.length === 1 ? ["used"] : runs.map((run) => run.name)), "default"];
  const part = (title, ranks) => {
    const found = rows.filter((row) => ranks.includes(row.rank));
    return found.length ? [element("h2", { textContent: `${title} (${found.length})` }), table("", columns, found)] : [];
  };
  const rest = part("At their defaults", [2]);
  const folded = element("details", { id: "defaults" }, element("summary", { textContent: rest[0]?.textContent ?? "" }), rest[1]);
  main.append(element("div", { id: "settings" }, part("Different between the runs", [0]), part(runs.length > 1 ? "Changed alike" : "Changed", [1]), rest.length ? folded : null));
}

// A setting without a value: what its help says happens then.
function unset(setting, otherwise = "none") {
  return /default: ([^;]*)/.exec(setting.help ?? "")?.[1] ?? otherwise;
}

function environmentTab(main) {
  for (const run of runs) {
    const times = { began: run.about.started, ended: run.about.ended };
    const about = { directory: run.path, status: run.status, ...run.about };
    for (const [name, seconds] of Object.entries(times)) if (seconds) about[name] = moment(seconds);
    for (const name of ["started", "ended"]) if (name !== "ended" || !times.ended) delete about[name];
    const draws = Object.entries(run.draws).map(([outcome, count]) => `${count.toLocaleString("en")} ${outcome}`).join(", ");
    if (draws) about.draws = draws;
    const rows = Object.entries(about).filter(([, value]) => !Array.isArray(value) || value.length).map(([name, value]) => [name.replaceAll("_", " "), asText(value)]);
    const names = ["kind", "alias", "name", "distribution", "version"];
    main.append(
      element("h2", {}, breakable(run.name)), table("", ["about", "value"], rows),
      element("h2", { textContent: "Plugins" }), table("", names, run.plugins.map((plugin) => names.map((name) => plugin[name] ?? ""))),
      element("details", {}, element("summary", { textContent: "Packages" }), element("div", { className: "text", textContent: run.requirements })),
    );
  }
}
