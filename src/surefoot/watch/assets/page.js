"use strict";
// The page: what is shown, asking for it, and keeping up with a live run at a cursor.
const Page = (() => {
  const { format, bytes, percent, duration, element, decode, append } = Numbers;
  const POINTS = 1500, MOST_POINTS = 4000, POLL_MS = 1000, SLOW_POLL_MS = 5000;
  const byId = (id) => document.getElementById(id);
  const frozenText = byId("frozen");
  const frozen = frozenText ? JSON.parse(frozenText.textContent) : null;
  const tags = {};
  const page = { run: null, curves: null, others: [], undone: [], incidents: [], log: false, view: null, zooms: [], seen: 0 };

  // -- asking

  async function ask(path) {
    if (frozen) return frozen[path.split(/[/?]/)[0]];
    const answer = await fetch(path, { headers: tags[path] ? { "If-None-Match": tags[path] } : {}, cache: "no-store" });
    if (answer.status === 304) return null;
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    if (answer.headers.get("ETag") && path.startsWith("run/")) tags[path] = answer.headers.get("ETag");
    return answer.json();
  }

  const askCurves = (run, first, last) => ask(`curves/${run}?first=${first}&last=${last}&size=${POINTS}`);
  const end = () => Number.MAX_SAFE_INTEGER;

  page.range = () => {
    if (page.view) return page.view;
    const lasts = [page.curves ? page.curves.last : 1, ...page.others.map((other) => other.curves.last)];
    return [0, Math.max(1, ...lasts)];
  };

  async function loadCurves() {
    const [first, last] = page.view || [0, end()];
    const answer = await askCurves(page.run, Math.floor(first), Math.ceil(last));
    page.curves = decode(answer);
    for (const other of page.others) other.curves = decode(await askCurves(other.id, Math.floor(first), Math.ceil(last)));
    Charts.draw(page);
    await loadFlow();
    page.shown = page.curves.version;
  }

  async function loadFlow() {
    const [first, last] = page.view || [0, end()];
    const answer = await ask(`flow/${page.run}?first=${Math.floor(first)}&last=${Math.ceil(last)}&size=400`);
    if (answer) Charts.drawFlow(page, answer);
    page.flowAt = Date.now();
  }

  // -- choosing

  page.zoom = async (first, last, remember = true) => {
    if (remember) page.zooms.push(page.view);
    page.view = first === null ? null : [Math.max(0, first), Math.max(first + 2, last)];
    const [from, to] = page.range();
    byId("range").textContent = page.view ? `attempts ${format(Math.floor(from))} to ${format(Math.ceil(to))}` : "";
    history.replaceState(null, "", page.view ? `#${Math.floor(from)}-${Math.ceil(to)}` : "#");
    document.body.dataset.ready = "";
    if (frozen) { Charts.draw(page); Charts.drawFlow(page, frozen.flow); } else await loadCurves();
    document.body.dataset.ready = "1";
  };
  page.showAll = () => { page.zooms = []; return page.zoom(null, null, false); };

  page.select = (number) => {
    const all = byId("incidents").querySelectorAll("details");
    all.forEach((details, at) => details.classList.toggle("selected", at === number));
    if (all[number]) { all[number].open = true; all[number].scrollIntoView({ block: "nearest" }); }
  };

  async function chooseRun(id) {
    Object.assign(page, { run: id, seen: 0, view: null, zooms: [], curves: null, undone: [], incidents: [], chosenLog: undefined });
    page.others = page.others.filter((other) => other.id !== id);
    byId("events").replaceChildren();
    byId("incidents").replaceChildren();
    byId("incidents").dataset.shown = "";
    document.body.dataset.ready = "";
    await showSummary(true);
    page.curves = decode(await askCurves(id, 0, end()));
    chooseScale();
    const wanted = /^#(\d+)-(\d+)$/.exec(location.hash);
    if (wanted) await page.zoom(Number(wanted[1]), Number(wanted[2])); else await loadCurves();
    document.body.dataset.ready = "1";
  }

  // Logarithmic where a blow-up would flatten everything else.
  function chooseScale() {
    const loss = page.curves.series.loss;
    if (!loss) return;
    const top = (loss.max || loss.mean).filter((value) => value > 0).sort();
    const low = (loss.min || loss.mean).some((value) => value <= 0);
    page.log = !low && top.length > 0 && top[top.length - 1] > 20 * top[top.length >> 1];
    byId("log").checked = page.log;
  }

  // -- showing

  function showNumbers(now) {
    const speed = [["tokens/s", now.tokens_per_s], ["samples/s", now.samples_per_s], ["steps/s", now.steps_per_s]].find((pair) => pair[1] !== null);
    const total = now.total_steps === null ? "" : ` of ${format(now.total_steps)}`;
    const facts = [
      ["step", now.step < 0 ? "none" : format(now.step) + total], ["loss", now.loss === null ? "NaN" : format(now.loss)],
      ["eval loss", format(now.eval_loss)], ["gradient norm", format(now.norm)], ["lr", format(now.lr)],
      ["loss scale", format(now.loss_scale)], [speed ? speed[0] : "", speed ? format(speed[1]) : ""],
      ["memory", bytes(now.memory)], ["data wait", percent(now.data_wait)],
      ["device busy", now.on_accelerator ? percent(now.utilisation) : ""],
      ["left", now.seconds_left === null || now.seconds_left <= 1 ? "" : duration(now.seconds_left)],
    ];
    byId("numbers").replaceChildren(...facts.filter(([name, value]) => name && value).map(([name, value]) => {
      const span = element("span", `${name} `);
      span.append(element("b", value));
      return span;
    }));
    byId("machine").textContent = now.bottleneck ? `Waiting for ${now.bottleneck}.` : "Nothing stands out: no long wait for data, no idle device.";
  }

  function incidentDetails(incident) {
    const details = element("details");
    const cause = incident.causes[0] || { evidence: [], advice: [] };
    details.append(element("summary", incident.title));
    for (const [label, text] of [...cause.evidence.map((line) => ["Why", line]), ...incident.done.map((line) => ["Done", line]), ["Result", incident.outcome], ...cause.advice.map((line) => ["To do", line]), ["Bundle", incident.bundle]])
      if (text) details.append(element("p", `${label}: ${text}`));
    for (const trial of incident.trials) {
      const table = element("table"), head = element("tr");
      details.append(element("p", `Trial: ${trial.sentence}`));
      head.append(...["branch", "probe loss", "steps"].map((name) => element("th", name)));
      table.append(head, ...trial.branches.map((branch) => {
        const row = element("tr"), loss = branch.probe_loss;
        const cells = [branch.text + (branch.chosen ? " (chosen)" : ""), typeof loss === "number" ? format(loss) : String(loss ?? "none"), format(branch.steps)];
        row.append(...cells.map((text) => element("td", text)));
        return row;
      }));
      details.append(table);
    }
    return details;
  }

  async function showSummary(all) {
    const answer = await ask(`run/${page.run}?first=${all ? 0 : page.seen}`);
    if (!answer) return null;
    byId("health").textContent = answer.verdict;
    byId("health").className = answer.verdict;
    byId("name").textContent = answer.name;
    byId("sentence").textContent = answer.sentence;
    document.title = `${answer.verdict}: ${answer.name}`;
    byId("verdict").dataset.state = answer.state;
    showNumbers(answer.numbers);
    Object.assign(page, { undone: answer.undone, incidents: answer.incidents, lastAttempt: answer.last_attempt });
    const shown = JSON.stringify(answer.incidents);
    if (byId("incidents").dataset.shown !== String(shown.length)) {
      const open = new Set([...byId("incidents").children].flatMap((child, at) => (child.open ? [at] : [])));
      const made = answer.incidents.map(incidentDetails);
      made.forEach((details, at) => { details.open = open.has(at) || (!open.size && at === made.length - 1); });
      byId("incidents").replaceChildren(...(made.length ? made : [element("span", "none")]));
      byId("incidents").dataset.shown = String(shown.length);
    }
    if (answer.lines_total < page.seen) byId("events").replaceChildren(); // the run directory was made again
    for (const line of answer.lines) {
      const row = element("div", "", "event");
      row.append(element("span", format(line.step)), element("span", line.label, line.label), element("span", line.text));
      byId("events").prepend(row);
    }
    page.seen = answer.lines_total;
    byId("facts").replaceChildren(...answer.facts.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
    return answer;
  }

  async function showRuns() {
    const answer = await ask("runs");
    const known = JSON.stringify(answer.runs);
    if (known === page.knownRuns) return answer;
    page.knownRuns = known;
    byId("run").replaceChildren(...answer.runs.map((run) => {
      const option = element("option", run.name);
      option.value = run.id;
      return option;
    }));
    byId("run").value = page.run || answer.first;
    byId("others").replaceChildren(...answer.runs.map((run) => {
      const label = element("label"), box = element("input");
      box.type = "checkbox";
      box.value = run.id;
      box.checked = page.others.some((other) => other.id === run.id);
      box.addEventListener("change", () => compare(run, box.checked));
      label.append(box, ` ${run.name}`);
      return label;
    }));
    byId("compare").hidden = answer.runs.length < 2;
    return answer;
  }

  async function compare(run, wanted) {
    page.others = page.others.filter((other) => other.id !== run.id);
    if (wanted && run.id !== page.run) {
      const [first, last] = page.view || [0, end()];
      page.others.push({ id: run.id, name: run.name, curves: decode(await askCurves(run.id, Math.floor(first), Math.ceil(last))) });
    }
    Charts.draw(page);
    document.body.dataset.compared = String(page.others.length);
  }

  // -- following

  async function follow() {
    const answer = await showSummary(false);
    if (!answer || answer.version === page.shown) return;
    const restarted = answer.last_attempt < page.curves.last;
    if (page.view && !restarted && page.view[1] <= page.curves.last) { page.shown = answer.version; return Charts.draw(page); }
    if (page.view || restarted || page.curves.attempts.length > MOST_POINTS) return loadCurves();
    const more = await askCurves(page.run, page.curves.last + 1, end());
    page.curves = append(page.curves, decode(more));
    page.shown = more.version;
    Charts.draw(page);
    if (Date.now() - page.flowAt > SLOW_POLL_MS) await loadFlow();
    return undefined;
  }

  async function poll() {
    let next = document.hidden ? SLOW_POLL_MS : POLL_MS;
    try {
      await follow();
      await showRuns();
      byId("notice").hidden = true;
    } catch (error) {
      byId("notice").hidden = false;
      byId("notice").textContent = `No answer from surefoot watch (${error.message}); trying again. If it was stopped, start it again.`;
      next = SLOW_POLL_MS;
    }
    setTimeout(poll, next);
  }

  async function start() {
    byId("log").addEventListener("change", () => { page.log = byId("log").checked; Charts.draw(page); });
    byId("all").addEventListener("click", () => page.showAll());
    byId("out").addEventListener("click", () => { const view = page.zooms.pop() || null; return page.zoom(view && view[0], view && view[1], false); });
    byId("run").addEventListener("change", () => { history.replaceState(null, "", "#"); return chooseRun(byId("run").value); });
    let timer = 0;
    addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(() => page.curves && (Charts.draw(page), frozen ? Charts.drawFlow(page, frozen.flow) : loadFlow()), 150); });
    const answer = await showRuns();
    await chooseRun(answer.first);
    if (!frozen) setTimeout(poll, POLL_MS);
  }

  start();
  return page;
})();
