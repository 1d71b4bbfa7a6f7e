// The dashboard: asks the bridge's own routes every second, and draws what they say. Nothing from elsewhere is used.

import { Timeline, colour } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const EVERY = 1000, TIMELINE_EVERY = 400, SAMPLES = 120;
const dark = matchMedia("(prefers-color-scheme: dark)");
const timeline = new Timeline($("timeline"), $("tip"));
const speeds = [];
let model = null;

// -- asking -----------------------------------------------------------------------------------------------------------

function headers(more = {}) {
  const key = sessionStorage.getItem("kvasir-key");
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

class KeyNeeded extends Error {}

async function get(path) {
  const answer = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(8000) });
  if (answer.status === 401) throw new KeyNeeded();
  if (!answer.ok) throw new Error(`the bridge answered ${answer.status}`);
  return answer.json();
}

function askForKey() {
  $("key-problem").textContent = sessionStorage.getItem("kvasir-key") ? "That key is not one of the bridge's." : "";
  if ($("key-form").hidden) { $("key-form").hidden = false; $("key").focus(); }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("kvasir-key", $("key").value.trim());
  $("key").value = "";
  refresh();
});

// -- words ------------------------------------------------------------------------------------------------------------

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const count = (n, one, many = `${one}s`) => `${number.format(n)} ${n === 1 ? one : many}`;
const percent = (share) => `${Math.round(100 * share)} %`;
const layers = (first, end) => (end === first + 1 ? `layer ${first}` : `layers ${first} to ${end - 1}`);
const shortPeer = (peer) => `…${peer.slice(-8)}`;

function duration(ms) {
  if (ms >= 10000) return `${Math.round(ms / 1000)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return ms >= 10 ? `${Math.round(ms)} ms` : `${ms.toFixed(1)} ms`;
}

function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 1000 && unit < units.length - 1) { n /= 1000; unit += 1; }
  return `${n >= 100 || !unit ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

/** A new element; what is text stays text, whatever is in it. */
function make(tag, className, ...inside) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...inside.filter((part) => part !== null && part !== ""));
  return element;
}

const set = (id, text) => { const element = $(id); if (element.textContent !== text) element.textContent = text; };

function setNumber(id, value, unit = "") {
  $(id).replaceChildren(value, ...(unit ? [make("u", "", unit)] : []));
}

// -- the ring ---------------------------------------------------------------------------------------------------------

function headline(ring) {
  const here = ring.stages.length + ring.others.length, wanted = ring.wanted_stages;
  const name = make("em", "", ring.model);
  const say = (...parts) => $("headline").replaceChildren(...parts);
  if (ring.state === "serving") say(name, ` is served by ${count(ring.stages.length, "machine")}`);
  else if (ring.state === "mending") say("The ring of ", name, " is being mended");
  else if (ring.state === "loading" || ring.state === "starting") say(name, " is being loaded");
  else if (here < wanted) say(name, ` waits for ${count(wanted - here, "more machine")}`);
  else say(name, " can't be served yet");
  const words = ring.ring_state.name ? ring.ring_state.text : ring.missing;
  if ($("words").dataset.said === words) return;
  $("words").dataset.said = words;
  $("words").dataset.state = ring.ring_state.name;
  const [first, ...rest] = words.split(": ");
  if (ring.ring_state.name && rest.length) $("words").replaceChildren(make("b", "", first), `: ${rest.join(": ")}`);
  else $("words").textContent = words;
}

function numbers(ring) {
  const w = ring.window, serving = ring.state === "serving";
  speeds.push(serving ? w.tokens_per_second : 0);
  if (speeds.length > SAMPLES) speeds.shift();
  setNumber("n-speed", serving ? w.tokens_per_second.toFixed(w.tokens_per_second < 100 ? 1 : 0) : "–");
  const top = Math.max(1, ...speeds) * 1.15, step = 120 / Math.max(40, speeds.length - 1);
  const points = speeds.map((speed, at) => `${(120 - (speeds.length - 1 - at) * step).toFixed(2)},${(33 - (speed / top) * 32).toFixed(2)}`);
  const [area, line] = $("spark").children;
  line.setAttribute("d", `M${points.join("L")}`);
  area.setAttribute("d", `M${120 - (speeds.length - 1) * step},34L${points.join("L")}L120,34Z`);
  setNumber("n-active", number.format(ring.requests.active));
  set("n-done", `${number.format(ring.requests.finished)} answered`);
  if (w.round_trip_ms) setNumber("n-trip", ...duration(w.round_trip_ms).split(" "));
  else setNumber("n-trip", "–");
  setNumber("n-flight", serving ? number.format(w.in_flight) : "–", ring.widths && serving ? `of ${ring.widths.max_in_flight}` : "");
  set("n-rows", serving ? `${w.rows_per_second.toFixed(w.rows_per_second < 10 ? 1 : 0)} rows a second` : "");
  setNumber("n-tokens", number.format(ring.requests.tokens));
  set("n-epoch", ring.epoch ? `epoch ${ring.epoch} of the ring` : "");
}

function stageElement(stage, ring) {
  const w = stage.window, item = make("li", "stage");
  const bar = make("div", "bar");
  const share = (className, part) => {
    const piece = make("i", className);
    piece.style.width = `${100 * part}%`;
    bar.append(piece);
  };
  const facts = [stage.engine, w && w.pass_ms ? `${duration(w.pass_ms)} a pass` : ""].filter(Boolean).join(" · ");
  const peer = make("span", "peer", shortPeer(stage.peer));
  peer.title = stage.peer;
  item.append(make("span", "rank", String(stage.stage + 1)));
  item.append(make("div", "who", make("b", "", layers(stage.first, stage.end)), peer, make("span", "facts", facts)));
  item.append(bar);
  const under = make("div", "under");
  if (ring.state === "serving" && w) {
    share("held", w.held); share("blocked", w.blocked);
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `held ${percent(w.held)}, blocked ${percent(w.blocked)}, starved ${percent(w.starved)}`);
    under.append(
      make("span", "", make("b", "", percent(w.held)), " held"), make("span", "", make("b", "", percent(w.blocked)), " blocked"),
      make("span", "", make("b", "", percent(w.starved)), " starved"), make("span", "", `queue ${w.queue.toFixed(1)}`),
      make("span", "", `${w.rows_per_second.toFixed(w.rows_per_second < 10 ? 1 : 0)} rows/s`),
    );
    item.append(under);
    const last = stage.stage + 1 === ring.stages.length;
    const parts = [last ? "tokens to the head and the bridge" : `to stage ${stage.stage + 2}`];
    if (w.path) parts.push(w.path, `${duration(w.round_trip_ms)} there and back`);
    if (!last) parts.push(`${bytes(w.bytes_per_second)}/s`);
    if (w.link >= 0.05) parts.push(`busy ${percent(w.link)} of the time`);
    item.append(make("div", ring.ring_state.link === stage.stage ? "link busy" : "link", parts.join(" · ")));
  } else {
    const moved = stage.transfer;
    if (moved && moved.total) {
      share("done", Math.min(1, moved.done / moved.total));
      under.append(`${stage.state} · ${bytes(moved.done)} of ${bytes(moved.total)}${moved.per_second ? ` · ${bytes(moved.per_second)}/s` : ""}`);
    } else {
      if (stage.state === "loaded" || stage.state === "serving") share("done", 1);
      under.append(stage.state);
    }
    item.append(under);
  }
  if (ring.ring_state.stage === stage.stage) item.classList.add("pace");
  if (stage.state === "gone" || stage.state === "broken") {
    item.classList.add("gone");
    if (stage.reason) item.append(make("p", "why", stage.reason));
  }
  item.title = stage.why;
  return item;
}

function drawRing(ring) {
  $("layers").replaceChildren(...ring.stages.map((stage) => {
    const part = make("span", ring.ring_state.stage === stage.stage ? "pace" : ["gone", "broken"].includes(stage.state) ? "gone" : "",
      stage.end === stage.first + 1 ? String(stage.first) : `${stage.first}–${stage.end - 1}`);
    part.style.flex = `${stage.end - stage.first} 1 0`;
    return part;
  }));
  $("layers").hidden = !ring.stages.length;
  $("layers").setAttribute("aria-label", ring.stages.map((s) => `stage ${s.stage + 1}: ${layers(s.first, s.end)}`).join("; "));
  if (ring.stages.length) $("stages").replaceChildren(...ring.stages.map((stage) => stageElement(stage, ring)));
  else $("stages").replaceChildren(make("li", "empty", `A ring of ${ring.wanted_stages} stages begins when ${ring.wanted_stages} machines are here.`));
  const others = ring.others.map((other) => {
    const what = other.role === "standby" && other.slice ? `stands by for ${layers(...other.slice)}` : other.why || other.role;
    const line = make("div", "", make("b", "", shortPeer(other.peer)), ` ${what}`);
    line.title = other.peer;
    return line;
  });
  $("others").className = others.length ? "others" : "";
  $("others").replaceChildren(...others);
}

function drawRequests() {
  const shown = [...timeline.requests.values()].sort((a, b) => a.request - b.request).slice(-14);
  $("requests").replaceChildren(...shown.map((request) => {
    const dot = make("i", "");
    dot.style.background = colour(request.request, dark.matches);
    return make("li", request.active ? "" : "over", dot, `request ${request.request}`, make("span", "small", request.tokens ? count(request.tokens, "token") : `${request.prefill_rows} rows read`));
  }));
}

// -- keeping it up to date ----------------------------------------------------------------------------------------------

function away(problem) {
  $("pill").dataset.state = "away";
  set("pill-text", "no answer");
  $("notice").hidden = false;
  set("notice", `The bridge does not answer (${problem}); trying again.`);
}

async function refresh() {
  try {
    const { models } = await get("/api/ring");
    choose(models.map((entry) => entry.model));
    if (model === null) { $("notice").hidden = true; return; }
    const ring = await get(`/api/ring/${encodeURIComponent(model)}`);
    $("notice").hidden = $("key-form").hidden = true;
    $("pill").dataset.state = ring.state;
    set("pill-text", ring.state);
    document.title = `${ring.state === "serving" ? "" : `${ring.state} · `}${ring.model} · Kvasir`;
    headline(ring);
    numbers(ring);
    drawRing(ring);
  } catch (problem) {
    if (problem instanceof KeyNeeded) askForKey();
    else away(problem.message);
  }
}

function choose(names) {
  if (!names.includes(model)) { model = names[0] ?? null; timeline.clear(); }
  const list = $("models");
  if ([...list.options].map((option) => option.value).join("\n") !== names.join("\n"))
    list.replaceChildren(...names.map((name) => new Option(name, name, false, name === model)));
  list.hidden = names.length < 2;
}

$("models").addEventListener("change", (event) => { model = event.target.value; timeline.clear(); refresh(); });

async function refreshTimeline() {
  if (model === null || timeline.paused || !$("key-form").hidden) return;
  const after = timeline.last >= 0 ? `&after=${timeline.last}` : "";
  const asked = model;
  const fresh = await get(`/api/ring/${encodeURIComponent(asked)}/timeline?seconds=30${after}`);
  if (asked !== model) return;
  timeline.add(fresh);
  drawRequests();
}

/** Do something again and again, each time when the last is done, and not while nobody looks. */
async function forever(work, pause) {
  for (;;) {
    if (!document.hidden) await work().catch(() => {}); // `refresh` shows what is wrong
    await new Promise((resume) => setTimeout(resume, pause));
  }
}

async function drawJoin() {
  const info = await get("/api/join");
  const end = new Date(1000 * info.expires);
  const over = end < new Date();
  set("join", `Swarm ${info.swarm}; for ${info.roles.join(" or ")}; ${over ? "the ticket has expired: start the bridge again" : `good until ${end.toLocaleDateString(undefined, { dateStyle: "medium" })}`}.`);
}

for (const button of document.querySelectorAll("[data-seconds]")) {
  button.addEventListener("click", () => {
    timeline.seconds = Number(button.dataset.seconds);
    for (const other of document.querySelectorAll("[data-seconds]")) other.setAttribute("aria-pressed", String(other === button));
    timeline.draw();
  });
}
$("hold").addEventListener("click", () => {
  timeline.pause(!timeline.paused);
  $("hold").setAttribute("aria-pressed", String(timeline.paused));
  set("hold", timeline.paused ? "Go on" : "Pause");
});

set("base", `${location.origin}/v1`);
for (const code of document.querySelectorAll("code.copy")) {
  const text = code.textContent;
  const button = make("button", "", "copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  if (navigator.clipboard) code.append(button); // only where the page is local or comes by TLS
}

// -- the chat -----------------------------------------------------------------------------------------------------------

let conversation = [], stop = null;

function bubble(className, text = "") {
  $("said").querySelector(".hint")?.remove();
  const said = $("said"), element = make("p", className, text);
  said.append(element);
  said.scrollTop = said.scrollHeight;
  return element;
}

/** The events of a streamed answer: `{data}` for each event, `{remark}` for each comment. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ")) yield { data: line.slice(6) };
      else if (line.startsWith(": ")) yield { remark: line.slice(2) };
    }
  }
}

async function refusal(answer) {
  if (answer.status === 401) askForKey();
  try { return (await answer.json()).error.message; } catch { return `the bridge answered ${answer.status}`; }
}

async function ask(question) {
  bubble("you", question);
  conversation.push({ role: "user", content: question });
  const element = bubble("it writing");
  const began = performance.now();
  let text = "", tokens = 0, first = 0, problem = "";
  stop = new AbortController();
  set("send", "Stop");
  set("told", "");
  try {
    const body = JSON.stringify({ model, messages: conversation, stream: true, stream_options: { include_usage: true } });
    const answer = await fetch("/v1/chat/completions", { method: "POST", body, headers: headers({ "Content-Type": "application/json" }), signal: stop.signal });
    if (!answer.ok) throw new Error(await refusal(answer));
    for await (const { data, remark } of events(answer.body)) {
      if (remark !== undefined) { set("told", `paused: ${remark}`); continue; }
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
      const piece = chunk.choices[0]?.delta?.content;
      if (!piece) continue;
      first ||= performance.now();
      text += piece;
      const said = $("said"), follow = said.scrollHeight - said.scrollTop - said.clientHeight < 60;
      element.textContent = text;
      if (follow) said.scrollTop = said.scrollHeight;
      set("told", `first words after ${duration(first - began)}`);
    }
  } catch (error) {
    if (error.name !== "AbortError") problem = error.message;
  }
  element.classList.remove("writing");
  stop = null;
  set("send", "Send");
  if (text) conversation.push({ role: "assistant", content: text });
  else { element.remove(); conversation.pop(); }
  if (problem) bubble("problem", problem).setAttribute("role", "alert");
  if (tokens > 1) set("told", `${count(tokens, "token")}; first after ${duration(first - began)}, then ${((1000 * (tokens - 1)) / Math.max(1, performance.now() - first)).toFixed(1)} a second`);
  $("forget").hidden = !conversation.length;
}

function submit() {
  if (stop !== null) { stop.abort(); return; }
  const question = $("question").value.trim();
  if (!question) return;
  if (model === null) { bubble("problem", "There is no model to ask yet."); return; }
  $("question").value = "";
  ask(question);
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (stop === null) submit(); }
});
$("forget").addEventListener("click", () => {
  stop?.abort();
  conversation = [];
  $("said").replaceChildren();
  $("forget").hidden = true;
  set("told", "");
});

forever(refresh, EVERY);
forever(refreshTimeline, TIMELINE_EVERY);
drawJoin().catch(() => {});
