// Tabs, themes, runs that go on, and the start.
const LIVE_MS = 2000, LONGEST_MS = 20000;
const TABS = { Metrics: metricsTab, Answers: answersTab, Settings: settingsTab, Environment: environmentTab };
let stamp = "", renew = () => {};

function render() {
  const { tab, group } = shown();
  chosen.group = group;
  document.getElementById("tabs").replaceChildren(...Object.keys(TABS).map((name) => element("a", { href: address({ tab: name }), textContent: name, attributes: name === tab ? { "aria-current": "page" } : {} })));
  forget();
  renew = () => {};
  const main = document.getElementById("main");
  main.replaceChildren();
  TABS[tab](main);
}

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
  setTimeout(follow, Math.min(LONGEST_MS, Math.max(LIVE_MS, 10 * (performance.now() - began))));
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  redraw();
}

theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
document.getElementById("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
const live = !document.getElementById("head");
chunk("head").then((found) => {
  runs = found;
  addEventListener("hashchange", () => {
    const from = scrollY;
    render();
    scrollTo(0, from);
  });
  render();
  if (live) follow();
}).catch((error) => document.getElementById("main").replaceChildren(element("p", { className: "warning", textContent: error.message })));
