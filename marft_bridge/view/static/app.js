// What pages do by themselves: they show what is new while a run goes on, obey keys, and draw curves.
// Everything on a page is there without this file, but for the curves. No text of the store becomes markup here: what
// is fetched is either a page of ours, escaped by its templates, or JSON, which is only ever written as text.
"use strict";
(() => {
  const REFRESH_MS = 2000; // at most one new page in so long
  const main = () => document.getElementById("main");
  const style = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();

  // -- live -----------------------------------------------------------------------------------------------------
  let stamp = document.body.dataset.stamp, source = null, timer = null, refreshed = Date.now();
  const live = document.getElementById("live");
  const tell = (text, on) => { live.textContent = text; live.classList.toggle("on", on); };

  const refresh = async () => {
    timer = null;
    refreshed = Date.now();
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      if (!answer.ok) return; // the store is being written; the next change asks again
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      stamp = page.body.dataset.stamp;
      Idiomorph.morph(main(), page.getElementById("main"), {
        ignoreActiveValue: true,
        callbacks: {
          beforeNodeMorphed: (node) => !(node.dataset && node.dataset.drawn), // curves are drawn anew from their data
          beforeAttributeUpdated: (name, node) => !(name === "open" && node.tagName === "DETAILS"),
        },
      });
      tell("updated " + new Date().toLocaleTimeString(), true);
      await drawCharts();
    } catch { tell("the server does not answer", false); }
  };
  const listen = () => {
    if (!stamp || source || document.hidden) return;
    source = new EventSource("/events?stamp=" + encodeURIComponent(stamp));
    source.addEventListener("open", () => tell("live", true));
    source.addEventListener("error", () => tell("the server does not answer", false));
    source.addEventListener("change", () => {
      timer = timer ?? setTimeout(refresh, Math.max(0, refreshed + REFRESH_MS - Date.now()));
    });
  };
  // A browser opens few connections to one server: a tab that nobody sees gives its own up.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { source?.close(); source = null; } else listen();
  });
  addEventListener("pagehide", () => { source?.close(); source = null; });
  addEventListener("pageshow", listen);

  // -- keys -----------------------------------------------------------------------------------------------------
  const step = (by) => {
    const neighbour = document.querySelector(by > 0 ? "a[rel=next]" : "a[rel=prev]");
    if (neighbour) return neighbour.click();
    const links = [...document.querySelectorAll("#main .listing tbody th a")];
    const next = links[Math.min(links.length - 1, Math.max(0, links.indexOf(document.activeElement) + by))];
    next?.focus();
    next?.scrollIntoView({ block: "nearest" });
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea")) return;
    const actions = {
      j: () => step(1),
      k: () => step(-1),
      "/": () => document.querySelector("input[type=search]")?.focus(),
      u: () => (document.querySelector("a.up") ?? [...document.querySelectorAll(".crumbs a")].pop())?.click(),
    };
    if (!Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
  });

  // -- curves ---------------------------------------------------------------------------------------------------
  const COLOURS = { light: ["#1b6a9c", "#a8501a", "#4f7d2a", "#7a4ea3", "#a23b60", "#52606d"],
                    dark: ["#74b9e6", "#eba06c", "#a3cf7c", "#c39be8", "#ec8fb0", "#a0a8b1"] };
  const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [1, 3], [12, 4]];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const readable = (value) => value == null ? "–" : Math.abs(value) >= 1000 || Number.isInteger(value)
    ? value.toLocaleString("en") : value.toPrecision(3);
  let plots = [];

  const drawChart = (chart, place) => {
    const colours = COLOURS[dark.matches ? "dark" : "light"], axis = {
      stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 },
      font: "11px system-ui", size: 58,
    };
    const nodes = [...new Set(chart.curves.map((curve) => curve.node))], runs = [...new Set(chart.curves.map((c) => c.run))];
    const card = document.createElement("section"), title = document.createElement("h4");
    card.className = "card chart";
    title.textContent = chart.name.replaceAll("_", " ");
    card.append(title);
    place.append(card);
    const few = chart.rounds.length <= 60;
    const plot = new uPlot({
      width: card.clientWidth - 26, height: 190, cursor: { sync: { key: "rounds" }, drag: { x: true, y: false } },
      scales: {
        x: { time: false, ...(chart.rounds.length === 1 && { range: [chart.rounds[0] - 1, chart.rounds[0] + 1] }) },
        // Never narrower than what the ticks can tell apart.
        y: { range: (_, low, high) => {
          const margin = Math.max((high - low) * 0.08, Math.abs(high) * 1e-3, 1e-9);
          return [low - margin, high + margin];
        } },
      },
      axes: [{ ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] },
             { ...axis, values: (_, ticks) => ticks.map((tick) => String(Number(tick.toPrecision(4)))) }],
      series: [{ label: "round" }, ...chart.curves.map((curve) => ({
        label: [runs.length > 1 ? curve.run : "", curve.node].filter(Boolean).join(" ") || chart.name,
        stroke: colours[nodes.indexOf(curve.node) % colours.length], dash: DASHES[runs.indexOf(curve.run) % DASHES.length],
        width: 1.6, spanGaps: true, points: { show: few, size: 5 }, value: (_, value) => readable(value),
      }))],
    }, [chart.rounds, ...chart.curves.map((curve) => curve.values)], card);
    const values = chart.curves.flatMap((curve) => curve.values).filter((value) => value != null);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label", `${title.textContent} over ${chart.rounds.length} rounds, from `
      + `${readable(values[0])} to ${readable(values.at(-1))}`);
    plots.push({ plot, card });
  };
  const drawCharts = async () => {
    const place = document.getElementById("charts");
    if (!place || !window.uPlot) return;
    const answer = await fetch(place.dataset.source, { credentials: "same-origin" });
    if (!answer.ok) return;
    const { charts } = await answer.json();
    plots.forEach(({ plot }) => plot.destroy());
    plots = [];
    place.dataset.drawn = "yes";
    place.replaceChildren();
    let group = null;
    for (const chart of charts) {
      const heading = chart.group || "round";
      if (heading !== group) {
        const title = document.createElement("h3");
        title.textContent = group = heading;
        place.append(title);
      }
      drawChart(chart, place);
    }
  };
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    plots.forEach(({ plot, card }) => plot.setSize({ width: card.clientWidth - 26, height: 190 }));
  });
  dark.addEventListener("change", drawCharts);
  addEventListener("DOMContentLoaded", drawCharts);
})();
