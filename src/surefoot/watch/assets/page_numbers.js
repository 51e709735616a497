"use strict";
// Decoding what the server sends, formatting numbers, and building elements. A run's own text only ever becomes
// textContent: nothing from a run is parsed as HTML.
const Numbers = (() => {
  const TYPES = { f8: Float64Array, f4: Float32Array, u1: Uint8Array };

  function unpack(text, type) {
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at);
    return new TYPES[type](bytes.buffer);
  }

  function format(value) {
    if (value === null || value === undefined) return "";
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
    if (size !== 0 && (size >= 1e6 || size < 1e-3)) return Number(value.toPrecision(4)).toExponential().replace("e+", "e");
    if (size >= 10000) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(4)));
  }

  function bytes(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "";
    const units = ["B", "kB", "MB", "GB", "TB"];
    let at = 0;
    while (value >= 1000 && at < units.length - 1) { value /= 1000; at++; }
    return `${Number(value.toPrecision(4))} ${units[at]}`;
  }

  const percent = (value) => (value === null || Number.isNaN(value) ? "" : `${Number((value * 100).toFixed(1))} %`);

  function duration(seconds) {
    const minutes = Math.round(seconds / 60);
    if (seconds < 90) return `${Math.round(seconds)} s`;
    if (minutes < 60) return `${minutes} min`;
    if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
    return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
  }

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined && text !== "") made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  // The curves of a run with typed arrays; `series[name]` has mean and, where they differ, min, max and nonfinite.
  function decode(answer) {
    const series = {};
    for (const [name, packed] of Object.entries(answer.series)) {
      series[name] = {};
      for (const [stat, text] of Object.entries(packed)) series[name][stat] = unpack(text, "f4");
    }
    return {
      first: answer.first, last: answer.last, version: answer.version,
      attempts: unpack(answer.attempts, "f8"), firsts: unpack(answer.firsts, "f8"), steps: unpack(answer.steps, "f8"),
      series,
    };
  }

  function joined(one, two) {
    const made = new one.constructor(one.length + two.length);
    made.set(one);
    made.set(two, one.length);
    return made;
  }

  // The curves with newer ones after them.
  function append(curves, more) {
    const count = curves.attempts.length, added = more.attempts.length;
    if (!added) return curves;
    const blank = (length, value) => new Float32Array(length).fill(value);
    const series = {};
    for (const name of new Set([...Object.keys(curves.series), ...Object.keys(more.series)])) {
      const old = curves.series[name] || {}, fresh = more.series[name] || {};
      series[name] = {};
      for (const stat of ["mean", "min", "max", "nonfinite"]) {
        if (!(stat in old) && !(stat in fresh)) continue;
        const gap = stat === "nonfinite" ? 0 : NaN, extreme = stat === "min" || stat === "max";
        const left = old[stat] || (extreme && old.mean) || blank(count, gap);
        const right = fresh[stat] || (extreme && fresh.mean) || blank(added, gap);
        series[name][stat] = joined(left, right);
      }
    }
    return {
      first: curves.first, last: more.last, version: more.version,
      attempts: joined(curves.attempts, more.attempts), firsts: joined(curves.firsts, more.firsts),
      steps: joined(curves.steps, more.steps), series,
    };
  }

  return { unpack, format, bytes, percent, duration, element, decode, append };
})();
