// The timeline: stages as rows, batches as bars, coloured by the requests whose rows they hold.

const ROW = 34, GAP = 10, LEFT = 64, AXIS = 22, TOP = 4;
const FRAME = 40; // milliseconds between two pictures: smooth enough, and little work where no GPU draws
const DELAY = 0.9; // seconds that the picture is behind, so that what comes late slides in at the edge

/** Colour of a request: neighbouring numbers are far apart on the wheel, and light enough for either theme. */
export function colour(number, dark) {
  const hue = (38 + number * 137.508) % 360;
  return `hsl(${hue.toFixed(1)} ${dark ? 56 : 54}% ${dark ? 62 : 55}%)`;
}

export class Timeline {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.batches = [];
    this.requests = new Map();
    this.stages = 0;
    this.seconds = 5;
    this.paused = false;
    this.offset = null; // bridge's clock minus ours
    this.frozen = 0;
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    new ResizeObserver(() => this.draw()).observe(canvas);
    this.dark.addEventListener("change", () => this.draw());
    let drawn = 0;
    const step = (time) => {
      if (time - drawn >= FRAME && !this.paused && !this.still.matches && this.batches.length) { drawn = time; this.draw(); }
      requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  get last() { return this.batches.length ? this.batches[this.batches.length - 1].number : -1; }

  /** Take up what the bridge says; `fresh` holds only batches that came after the last one known. */
  add(fresh) {
    const here = performance.now() / 1000;
    // The answer that was quickest on its way tells the difference of the clocks best.
    const offset = fresh.now - here;
    this.offset = this.offset === null ? offset : Math.max(offset, this.offset - 0.002);
    if (fresh.stages) this.stages = fresh.stages;
    if (fresh.batches.length && fresh.batches[0].number <= this.last) this.batches = []; // the bridge began anew
    this.batches.push(...fresh.batches);
    const old = fresh.now - 60;
    let drop = 0;
    while (drop < this.batches.length && this.batches[drop].returned < old) drop += 1;
    this.batches.splice(0, drop);
    for (const request of fresh.requests) this.requests.set(request.request, request);
    for (const [number, request] of this.requests) if (request.last < old) this.requests.delete(number);
    if (!this.paused && (this.still.matches || !this.batches.length)) this.draw();
  }

  clear() { this.batches = []; this.requests.clear(); this.stages = 0; this.draw(); }

  pause(on) { this.frozen = this.now(); this.paused = on; this.draw(); }

  now() {
    if (this.paused) return this.frozen;
    return this.offset === null ? 0 : performance.now() / 1000 + this.offset - DELAY;
  }

  visible() {
    const end = this.now(), start = end - this.seconds;
    return this.batches.filter((b) => b.bars.length && b.bars[b.bars.length - 1][1] > start && b.bars[0][0] < end);
  }

  draw() {
    const { canvas } = this, rows = Math.max(this.stages, 1);
    const height = TOP + rows * (ROW + GAP) + AXIS, width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const g = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(name).trim();
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    const end = this.now(), start = end - this.seconds, scale = (width - LEFT) / this.seconds;
    const x = (time) => LEFT + (time - start) * scale;

    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    for (let row = 0; row < rows; row += 1) {
      const y = TOP + row * (ROW + GAP);
      g.fillStyle = ink("--track");
      g.beginPath(); g.roundRect(LEFT, y, width - LEFT, ROW, 5); g.fill();
      g.fillStyle = ink("--soft");
      g.textAlign = "left";
      g.fillText(this.stages ? `stage ${row + 1}` : "", 0, y + ROW / 2);
    }
    g.textAlign = "center";
    const tick = this.seconds <= 2 ? 0.5 : this.seconds <= 5 ? 1 : 2;
    for (let back = 0; back < this.seconds + 1e-6; back += tick) {
      const at = Math.max(LEFT + 12, Math.min(width - 12, x(end - back)));
      g.fillText(back ? `−${back} s` : "now", at, height - AXIS / 2 + 2);
      if (back) { g.fillStyle = ink("--line"); g.fillRect(x(end - back), TOP, 1, rows * (ROW + GAP) - GAP); g.fillStyle = ink("--soft"); }
    }

    g.save();
    g.beginPath(); g.rect(LEFT, 0, width - LEFT, height); g.clip();
    const dark = this.dark.matches, none = ink("--soft");
    for (const batch of this.visible()) {
      const total = batch.runs.reduce((sum, run) => sum + run[1], 0) || 1;
      batch.bars.forEach(([from, to], stage) => {
        if (stage >= rows) return;
        const left = x(from), across = Math.max(1, (to - from) * scale - 0.75);
        let y = TOP + stage * (ROW + GAP);
        if (!batch.runs.length) { g.fillStyle = none; g.fillRect(left, y, across, ROW); return; }
        for (const [request, count] of batch.runs) {
          const part = (ROW * count) / total;
          g.fillStyle = colour(request, dark);
          g.fillRect(left, y, across, part);
          y += part;
        }
      });
    }
    g.restore();
  }

  /** Show what is under the pointer. */
  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const px = event.clientX - box.left, py = event.clientY - box.top;
    const stage = Math.floor((py - TOP) / (ROW + GAP));
    const end = this.now(), scale = (box.width - LEFT) / this.seconds, time = end - this.seconds + (px - LEFT) / scale;
    const near = 2 / scale;
    const hit = px < LEFT ? undefined : this.visible().find((b) => stage < b.bars.length && stage >= 0 && b.bars[stage][0] - near <= time && time <= b.bars[stage][1] + near);
    this.tip.hidden = !hit;
    if (!hit) return;
    const [from, to] = hit.bars[stage];
    const runs = hit.runs.map(([request, count, decode]) => `request ${request}: ${decode ? "the next token" : `${count} rows of its prompt`}`);
    if (runs.length > 6) runs.splice(5, runs.length, `and ${hit.runs.length - 5} more`);
    this.tip.textContent = [`batch ${hit.number} at stage ${stage + 1}: ${hit.rows} ${hit.rows === 1 ? "row" : "rows"} in ${((to - from) * 1000).toFixed(0)} ms`, ...runs].join("\n");
    this.tip.style.left = `${Math.min(px + 14, box.width - this.tip.offsetWidth)}px`;
    this.tip.style.top = `${py + 16}px`;
  }
}
