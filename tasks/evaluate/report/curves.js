// Draws the report's charts anew so that one can look into them, and sorts its tables. `charts.py` drew them for browsers
// without scripts, from the same points and with the same classes. Text from the run is set as text only, never as HTML.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("curves").textContent);
  const height = 280, left = 58, right = 22, top = 10, bottom = 32, maxDots = 40;
  const view = { x: "step", smoothing: 0, zoom: null };
  const controls = document.getElementById("controls");
  const drawings = [];

  const longest = Math.max(...data.clocks.map((clock) => clock.segments.at(-1)?.[3] ?? 0));
  const [perUnit, timeUnit] = longest < 300 ? [1, "seconds"] : longest < 18000 ? [60, "minutes"] : [3600, "hours"];
  const units = { step: "step", epoch: "epoch", time: `${timeUnit} since the run began` };

  function xOf(step, run = 0) {
    const { epochsPerStep, segments } = data.clocks[run];
    if (view.x === "epoch") return step * epochsPerStep;
    if (view.x === "step") return step;
    // Within a segment, steps are spread evenly over its seconds.
    for (const [first, last, began, ended] of segments) {
      if (step <= last) return (began + ((ended - began) * (step - first)) / Math.max(last - first, 1)) / perUnit;
    }
    return (segments.at(-1)?.[3] ?? 0) / perUnit;
  }

  // All charts show the same range.
  function range() {
    if (view.zoom) return view.zoom;
    const ends = data.charts.flatMap((chart) => chart.curves.flatMap(({ steps, run }) =>
      steps.length ? [xOf(steps[0], run), xOf(steps.at(-1), run)] : []));
    return [Math.min(0, ...ends), Math.max(1e-9, ...ends)];
  }

  // About `count` round numbers from low to high, 1, 2 or 5 times a power of ten apart.
  function ticks(low, high, count = 5) {
    const rough = (high - low) / count;
    if (!(rough > 0) || !isFinite(rough)) return [low];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= Math.floor(high / step + 1e-9); n += 1) found.push(n * step);
    return found;
  }

  // Powers of ten between two powers, thinned if they are many; of few decades also twice and five times as much.
  function decades(low, high) {
    const found = [];
    for (let power = Math.floor(low); power <= Math.floor(high); power += Math.ceil((high - low) / 8)) {
      found.push(...(high - low < 3 ? [1, 2, 5] : [1]).map((factor) => factor * 10 ** power));
    }
    return found.filter((value) => Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9);
  }

  function words(value) {
    if (value === null || !isFinite(value)) return "not finite";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3).replace(/\.?0+e/, "e");
    return Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
  }

  // Exponential moving average, corrected for its start (Kingma and Ba, 2015, section 3).
  function smoothed(values) {
    if (view.smoothing === 0) return values;
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = view.smoothing * mean + (1 - view.smoothing) * value;
      weight = view.smoothing * weight + (1 - view.smoothing);
      return mean / weight;
    });
  }

  function element(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  class Drawing {
    constructor(figure, chart) {
      Object.assign(this, { figure, chart, log: chart.log, cursor: null });
      this.old = figure.querySelector("svg");
      this.label = this.old.getAttribute("aria-label");
      this.readout = figure.querySelector("output");
      const box = figure.querySelector("input");
      box.checked = this.log;
      box.addEventListener("change", () => { this.log = box.checked; this.draw(); });
      figure.querySelector(".tools").hidden = false;
    }

    draw() {
      const width = Math.max(this.old.clientWidth || 640, 260);
      const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": this.label });
      const usable = (value) => value !== null && (value > 0 || !this.log);
      const map = (value) => (this.log ? Math.log10(value) : value);
      const [from, to] = range();
      const inside = (x) => x >= from && x <= to;
      const curves = this.chart.curves.map((curve) => ({
        ...curve, xs: curve.steps.map((step) => xOf(step, curve.run)), shown: curve.kind === "training" ? smoothed(curve.values) : curve.values,
      }));
      // Where there is a point: its x, and its step.
      this.places = [...new Map(curves.flatMap(({ xs, steps }) => xs.map((x, n) => [x, steps[n]])))].sort((a, b) => a[0] - b[0]);
      const visible = curves.flatMap((curve) =>
        curve.shown.concat(curve.values).filter((value, n) => usable(value) && inside(curve.xs[n % curve.xs.length])).map(map));
      let low = visible.reduce((a, b) => Math.min(a, b), Infinity), high = visible.reduce((a, b) => Math.max(a, b), -Infinity);
      if (!visible.length) { low = 0; high = 1; }
      if (this.chart.zero && !this.log) low = Math.min(low, 0);
      if (high <= low) { low -= 0.5; high += 0.5; }
      const px = (x) => left + ((width - left - right) * (x - from)) / (to - from);
      const py = (value) => height - bottom - ((height - top - bottom) * (map(value) - low)) / (high - low);
      Object.assign(this, { svg, px, from, to, width, curves });

      const marks = this.log && high - low > 1 ? decades(low, high)
        : this.log ? ticks(10 ** low, 10 ** high).filter((value) => value > 0) : ticks(low, high);
      for (const value of marks) {
        svg.append(element("path", { class: "grid", d: `M${left} ${py(value)}H${width - right}` }));
        svg.append(element("text", { class: "end", x: left - 6, y: py(value) + 4 }, words(value)));
      }
      for (const x of ticks(from, to, width < 420 ? 3 : 5)) {
        svg.append(element("text", { class: "middle", x: px(x), y: height - 18 }, Number(x.toPrecision(6)).toLocaleString("en")));
      }
      svg.append(element("text", { class: "end", x: width - right, y: height - 4 }, units[view.x]));
      const upright = (step) => `M${px(xOf(step))} ${top}V${height - bottom}`;
      for (const step of data.borders.filter((each) => inside(xOf(each)))) {
        svg.append(element("path", { class: "border quiet", d: upright(step) }));
      }
      for (const event of data.events.filter((each) => inside(xOf(each.step)))) {
        const line = element("path", { class: `event ${event.kind}`, d: upright(event.step) });
        line.append(element("title", {}, event.text));
        svg.append(line);
      }
      for (const { color, kind, steps, values, xs, shown } of curves) {
        // A path through the points: joined by lines, or a dot at each.
        const draw = (form, ys) => {
          let path = "", joined = false;
          ys.forEach((value, n) => {
            const drawable = usable(value) && inside(xs[n]);
            const dot = { dots: "h0", hollow: "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0" }[form] ?? "";
            if (drawable) path += `${joined && !dot ? "L" : "M"}${px(xs[n]).toFixed(1)} ${py(value).toFixed(1)}${dot}`;
            joined = drawable;
          });
          svg.append(element("path", { class: `${form} ${color}`, d: path }));
        };
        if (kind === "training" && view.smoothing > 0) draw("faint line", values);
        draw({ validation: "joined", partial: "hollow" }[kind] ?? "line", shown);
        const few = steps.length <= maxDots && !this.chart.zero && kind !== "partial";
        if (kind === "validation" || few) draw("dots", shown);
      }
      this.hair = element("path", { class: "hair", d: "" });
      this.band = element("rect", { class: "band training", y: top, height: height - top - bottom, width: 0 });
      svg.append(this.hair, this.band);
      this.listen(svg);
      this.old.replaceWith(svg);
      this.old = svg;
      if (this.cursor !== null) this.point(this.cursor);
    }

    // Says what the curves are at a place, and marks it. Runs need not have points at the same x.
    point([x, step]) {
      this.cursor = [x, step];
      this.hair.setAttribute("d", `M${this.px(x)} ${top}V${height - bottom}`);
      const several = data.clocks.length > 1, near = several ? (this.to - this.from) / 100 : 0;
      const said = this.curves.flatMap(({ label, values, xs, steps }) => {
        const far = xs.map((each) => Math.abs(each - x)), n = far.indexOf(far.reduce((a, b) => Math.min(a, b), Infinity));
        const at = several && steps[n] !== step ? ` at step ${steps[n].toLocaleString("en")}` : "";
        return n === -1 || far[n] > near ? [] : [`${label} ${words(values[n])}${at}`];
      });
      const epochs = data.clocks[0].epochsPerStep;
      const epoch = epochs && !several ? `, epoch ${words(step * epochs)}` : "";
      const here = data.events.filter((event) => event.step === step).map((event) => event.text);
      this.readout.textContent = [`step ${step.toLocaleString("en")}${epoch}`, ...said, ...here].join("  ·  ");
    }

    nearest(event) {
      const box = this.svg.getBoundingClientRect();
      const x = this.from + (((event.clientX - box.left) * (this.width / box.width) - left) / (this.width - left - right)) * (this.to - this.from);
      let best = this.places[0];
      for (const place of this.places) if (Math.abs(place[0] - x) < Math.abs(best[0] - x)) best = place;
      return [best, Math.min(Math.max(x, this.from), this.to)];
    }

    listen(svg) {
      let began = null;
      svg.addEventListener("pointermove", (event) => {
        if (!this.places.length) return;
        const [place, x] = this.nearest(event);
        this.point(place);
        if (began !== null) {
          this.band.setAttribute("x", Math.min(this.px(began), this.px(x)));
          this.band.setAttribute("width", Math.abs(this.px(x) - this.px(began)));
        }
      });
      svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") began = this.nearest(event)[1]; });
      svg.addEventListener("pointerup", (event) => {
        if (began === null) return;
        const ends = [began, this.nearest(event)[1]].sort((a, b) => a - b);
        began = null;
        if (this.px(ends[1]) - this.px(ends[0]) > 8) view.zoom = ends;
        redraw(false);
      });
      svg.addEventListener("dblclick", () => redraw(true));
      svg.addEventListener("keydown", (event) => {
        const end = this.places.length - 1, at = this.places.findIndex(([x]) => x === this.cursor?.[0]);
        const moved = { ArrowRight: at + 1, ArrowLeft: Math.max(at - 1, 0), Home: 0, End: end }[event.key];
        if (moved !== undefined && end >= 0) {
          this.point(this.places[Math.min(moved, end)]);
          event.preventDefault();
        } else if (event.key === "Escape") {
          redraw(true);
          this.old.focus();
        }
      });
    }
  }

  function redraw(reset) {
    if (reset) view.zoom = null;
    for (const drawing of drawings) {
      if (reset) drawing.cursor = null;
      drawing.draw();
    }
  }

  for (const choice of controls.querySelectorAll("input[name=x]")) {
    if (choice.value === "epoch" && data.clocks.some((clock) => !clock.epochsPerStep)) choice.parentElement.hidden = true;
    if (choice.value === "time" && data.clocks.some((clock) => !clock.segments.length)) choice.parentElement.hidden = true;
    if (choice.checked && !choice.parentElement.hidden) view.x = choice.value; // as a reloaded page keeps it
    choice.addEventListener("change", () => { view.x = choice.value; redraw(true); });
  }
  controls.querySelector("input[type=range]").addEventListener("input", (event) => {
    view.smoothing = Number(event.target.value);
    redraw(false);
  });
  document.querySelectorAll("figure[data-chart]").forEach((figure) => {
    drawings.push(new Drawing(figure, data.charts[Number(figure.dataset.chart)]));
  });
  if (drawings.length) controls.hidden = false;
  redraw(false);
  let waiting;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => redraw(false), 100); });

  // Tables: a click on a heading sorts by its column, a second one the other way round.
  for (const table of document.querySelectorAll("table")) {
    table.querySelectorAll("thead th").forEach((heading) => {
      const column = heading.cellIndex;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = heading.textContent;
      heading.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") === "ascending";
        table.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const key = (row) => {
          const cell = row.cells[column];
          if (cell.dataset.sort !== undefined) return Number(cell.dataset.sort);
          const text = cell.textContent.trim(), number = Number(text.replace(/[,%]/g, ""));
          return text === "" ? -Infinity : isNaN(number) ? text : number;
        };
        const order = (a, b) => (typeof a === typeof b && typeof a === "string" ? a.localeCompare(b) : a < b ? -1 : a > b ? 1 : 0);
        const rows = [...body.rows].sort((one, other) => order(key(one), key(other)));
        body.append(...(down ? rows.reverse() : rows));
      });
    });
  }
})();
