"use strict";
// The charts and the picture of the gradient flow. A chart shows the mean of each bucket as a line and its minimum and
// maximum as a band, so that a spike of one step stays visible at any zoom.
const Charts = (() => {
  const { format, bytes, percent, element, unpack } = Numbers;
  const perSecond = (curves) => {
    const seconds = (curves.series.seconds || {}).mean;
    if (!seconds) return null;
    const unit = ["tokens", "samples"].find((name) => curves.series[name]);
    const counts = unit ? curves.series[unit].mean : null;
    return { unit: unit || "steps", values: seconds.map((s, at) => (counts ? counts[at] : 1) / s) };
  };
  const shareOfTime = (curves) => {
    const { seconds, data_wait: wait } = curves.series;
    return seconds && wait ? wait.mean.map((value, at) => value / seconds.mean[at]) : null;
  };
  const SPECS = [
    { key: "loss", title: "loss", main: "loss", extra: ["eval_loss"], show: format, log: true },
    { key: "norm", title: "gradient norm", main: "norm", extra: ["norm_limit"], show: format, log: true },
    { key: "lr", title: "learning rate", main: "lr", extra: [], show: format, log: true },
    { key: "speed", title: "throughput", derive: (c) => (perSecond(c) || {}).values, show: format,
      label: (c) => `${(perSecond(c) || {}).unit} per second` },
    { key: "memory", title: "memory", main: "memory", extra: ["memory_peak"], show: bytes, sparse: true },
    { key: "load", title: "machine load", derive: shareOfTime, extra: ["utilisation"], show: percent,
      label: () => "time spent waiting for data" },
  ];
  const LABELS = { eval_loss: "eval loss", norm_limit: "limit", memory_peak: "peak", utilisation: "device busy" };
  const OTHERS = ["#8250df", "#1a7f37", "#bf3989", "#0f7b8a", "#b35900", "#5b6ee1"];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clean = (values, log) => Array.from(values, (v) => (Number.isFinite(v) && (!log || v > 0) ? v : null));

  // What a chart draws of one run: uPlot's columns and, for each, how it looks.
  function tables(spec, curves, others, log) {
    const data = [Array.from(curves.attempts)], looks = [], bands = [];
    const main = spec.derive ? { mean: spec.derive(curves) } : curves.series[spec.main];
    if (!main || !main.mean) return null;
    const width = 1.25;
    if (main.max) {
      data.push(clean(main.max, log), clean(main.min, log));
      const edge = { stroke: css("--edge"), width: 1, points: { show: false } };
      looks.push({ ...edge }, { ...edge });
      bands.push({ series: [1, 2], fill: css("--band") });
    }
    data.push(clean(main.mean, log));
    const few = curves.attempts.length < 80;
    looks.push({ stroke: css("--main"), width, spanGaps: Boolean(spec.sparse), points: { show: few, size: 4 }, label: "mean" });
    for (const name of spec.extra || []) {
      if (!curves.series[name]) continue;
      data.push(clean(curves.series[name].mean, log));
      const sparse = name === "eval_loss" && curves.series[name].mean.filter(Number.isFinite).length < 60;
      looks.push({ stroke: css("--second"), width: 1, spanGaps: true, auto: name !== "norm_limit", dash: name === "eval_loss" ? undefined : [5, 4], points: { show: sparse, size: 5 }, label: LABELS[name] });
    }
    const all = [data];
    others.forEach((other, at) => {
      const values = spec.derive ? spec.derive(other.curves) : (other.curves.series[spec.main] || {}).mean;
      if (!values) return;
      all.push([Array.from(other.curves.attempts), clean(values, log)]);
      looks.push({ stroke: OTHERS[at % OTHERS.length], width: 1, points: { show: false }, label: other.name });
    });
    return { data: all.length > 1 ? uPlot.join(all) : data, looks, bands, main };
  }

  // What lies behind and on top of the curves: undone attempts, incidents, non-finite values.
  function painter(spec, page, main) {
    const marks = () => main.nonfinite || [];
    return { hooks: {
      drawClear: (u) => {
        const { ctx, bbox } = u;
        ctx.save();
        ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
        ctx.fillStyle = css("--undone");
        for (const [first, last] of page.undone) {
          const from = u.valToPos(first, "x", true), to = u.valToPos(last, "x", true);
          ctx.fillRect(from, bbox.top, Math.max(1, to - from), bbox.height);
        }
        ctx.restore();
      },
      draw: (u) => {
        const { ctx, bbox } = u, ratio = devicePixelRatio || 1;
        ctx.save();
        ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
        ctx.strokeStyle = css("--mark"); ctx.fillStyle = css("--mark"); ctx.lineWidth = ratio;
        for (const incident of page.incidents) {
          const x = u.valToPos(incident.attempt, "x", true), bottom = bbox.top + bbox.height;
          ctx.setLineDash([3 * ratio, 3 * ratio]);
          ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bottom); ctx.stroke();
          ctx.setLineDash([]);
          ctx.beginPath(); ctx.moveTo(x, bottom - 8 * ratio); ctx.lineTo(x - 5 * ratio, bottom); ctx.lineTo(x + 5 * ratio, bottom); ctx.fill();
        }
        ctx.strokeStyle = css("--bad"); ctx.lineWidth = 1.5 * ratio;
        const size = 3.5 * ratio, y = bbox.top + 7 * ratio;
        marks().forEach((count, at) => {
          if (!count) return;
          const x = u.valToPos(page.curves.attempts[at], "x", true);
          ctx.beginPath(); ctx.moveTo(x - size, y - size); ctx.lineTo(x + size, y + size);
          ctx.moveTo(x + size, y - size); ctx.lineTo(x - size, y + size); ctx.stroke();
        });
        ctx.restore();
      },
    } };
  }

  function readout(spec, page, main, at) {
    const { curves } = page;
    const attempt = curves.attempts[at], first = curves.firsts[at];
    const where = first === attempt ? `attempt ${format(attempt)}` : `attempts ${format(first)} to ${format(attempt)}`;
    let text = `step ${format(curves.steps[at])}, ${where}: ${spec.show(main.mean[at])}`;
    if (main.max && main.min[at] !== main.max[at]) text += ` (${spec.show(main.min[at])} to ${spec.show(main.max[at])})`;
    if (main.nonfinite && main.nonfinite[at]) text += `, ${format(main.nonfinite[at])} not finite`;
    return text;
  }

  function nearest(values, x) {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - values[low - 1] < values[low] - x ? low - 1 : low;
  }

  function make(spec, page, box, small) {
    const log = Boolean(spec.log && page.log);
    const table = tables(spec, page.curves, page.others, log);
    if (!table) return null;
    const legend = table.looks.filter((look) => look.label && look.label !== "mean").map((look) => look.label).join(", ");
    const idle = (spec.label ? spec.label(page.curves) : "") + (legend ? `${spec.label ? "; " : ""}also ${legend}` : "");
    small.textContent = idle;
    const axis = { stroke: css("--dim"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1 }, font: "11px system-ui" };
    const plot = new uPlot({
      width: box.clientWidth, height: 220, legend: { show: false }, bands: table.bands, plugins: [painter(spec, page, table.main)],
      cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "surefoot" }, points: { show: false } },
      scales: { x: { time: false, range: () => page.range() }, y: { distr: log ? 3 : 1 } },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map(format), size: 30 },
        { ...axis, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : spec.show(tick))), size: 68 },
      ],
      series: [{}, ...table.looks],
      hooks: {
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width > 2 && !page.selecting) { // the other charts, in sync, report the same selection
            const first = u.posToVal(left, "x"), last = u.posToVal(left + width, "x");
            page.selecting = true;
            setTimeout(() => { page.selecting = false; page.zoom(first, last); });
          }
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        setCursor: [(u) => {
          const x = u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null;
          small.textContent = x === null ? idle : readout(spec, page, table.main, nearest(page.curves.attempts, x));
        }],
      },
    }, table.data, box);
    plot.over.addEventListener("dblclick", () => page.showAll());
    plot.over.addEventListener("click", (event) => {
      const x = plot.posToVal(event.offsetX, "x"), [first, last] = page.range();
      const hit = page.incidents.findIndex((incident) => Math.abs(incident.attempt - x) < (last - first) * 0.012);
      if (hit >= 0) page.select(hit);
    });
    return plot;
  }

  function draw(page) {
    const holder = document.getElementById("charts");
    (page.plots || []).forEach((plot) => plot.destroy());
    page.plots = [];
    for (const spec of SPECS) if (!document.getElementById(`chart-${spec.key}`)) {
      const card = element("div", "", "chart"), title = element("h2", spec.title);
      card.id = `chart-${spec.key}`;
      title.append(element("small"));
      card.append(title, element("div"));
      holder.append(card);
    }
    for (const spec of SPECS) {
      const card = document.getElementById(`chart-${spec.key}`);
      card.hidden = false;
      const plot = make(spec, page, card.lastChild, card.querySelector("small"));
      card.hidden = !plot;
      if (plot) page.plots.push(plot);
    }
  }

  // -- gradient flow

  const RAMP = [[13, 8, 60], [60, 25, 130], [45, 95, 165], [30, 150, 140], [125, 200, 75], [250, 230, 60]];
  function colour(share) {
    const place = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1), at = Math.min(Math.floor(place), RAMP.length - 2);
    return RAMP[at].map((low, channel) => Math.round(low + (RAMP[at + 1][channel] - low) * (place - at)));
  }

  function drawFlow(page, flow) {
    const section = document.getElementById("flow");
    section.hidden = !flow.names.length;
    if (!flow.names.length) return;
    const cells = unpack(flow.cells, "u1"), firsts = unpack(flow.firsts, "f8"), lasts = unpack(flow.lasts, "f8");
    const layers = flow.names.length, count = firsts.length;
    const canvas = document.getElementById("flow-canvas");
    canvas.width = canvas.clientWidth * (devicePixelRatio || 1);
    canvas.height = canvas.clientHeight * (devicePixelRatio || 1);
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (!count) return;
    const picture = new OffscreenCanvas(count, layers), ink = picture.getContext("2d"), image = ink.createImageData(count, layers);
    for (let bucket = 0; bucket < count; bucket++) for (let layer = 0; layer < layers; layer++) {
      const cell = cells[bucket * layers + layer], at = 4 * (layer * count + bucket);
      const [red, green, blue] = cell === 255 ? [230, 30, 45] : colour((cell - 1) / 253);
      image.data[at] = red; image.data[at + 1] = green; image.data[at + 2] = blue; image.data[at + 3] = cell ? 255 : 0;
    }
    ink.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    const [low, high] = page.range(), place = (attempt) => ((attempt - low) / (high - low || 1)) * canvas.width;
    for (let bucket = 0; bucket < count; bucket++) {
      const from = place(firsts[bucket]), to = place(bucket + 1 < count ? firsts[bucket + 1] : lasts[bucket] + 1);
      context.drawImage(picture, bucket, 0, 1, layers, from, 0, Math.max(1, to - from), canvas.height);
    }
    const value = (cell) => (cell === 0 ? "none" : cell === 255 ? "NaN or Inf" : format(10 ** (flow.low + ((cell - 1) / 253) * (flow.high - flow.low))));
    canvas.onmousemove = (event) => {
      const attempt = low + (event.offsetX / canvas.clientWidth) * (high - low);
      const layer = Math.min(layers - 1, Math.floor((event.offsetY / canvas.clientHeight) * layers));
      let bucket = 0;
      while (bucket + 1 < count && firsts[bucket + 1] <= attempt) bucket++;
      const range = firsts[bucket] === lasts[bucket] ? format(firsts[bucket]) : `${format(firsts[bucket])} to ${format(lasts[bucket])}`;
      document.getElementById("flow-readout").textContent = `${flow.names[layer]}, attempts ${range}: highest norm ${value(cells[bucket * layers + layer])}`;
    };
    canvas.onmouseleave = () => { document.getElementById("flow-readout").textContent = idleText; };
    const idleText = `highest gradient norm of each of ${layers} layers, first layer on top`;
    document.getElementById("flow-readout").textContent = idleText;
    document.getElementById("flow-top").textContent = "first";
    document.getElementById("flow-bottom").textContent = "last";
    document.getElementById("flow-low").textContent = format(10 ** flow.low);
    document.getElementById("flow-high").textContent = format(10 ** flow.high);
    const ramp = document.getElementById("flow-ramp").getContext("2d");
    for (let x = 0; x < 160; x++) { ramp.fillStyle = `rgb(${colour(x / 159)})`; ramp.fillRect(x, 0, 1, 10); }
  }

  return { draw, drawFlow };
})();
