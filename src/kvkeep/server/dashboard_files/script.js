// The dashboard: asks the admin API every two seconds and shows the answers. The token is kept in a
// variable of this page only, and is sent in a header. All text is set as text, never as HTML.

const EVERY_MS = 2000;
const KEPT = 300; // points of the charts: ten minutes
const GIB = 2 ** 30;
const SHADES = 6;
const NO_MISS = new Set(["local", "loaded", "last"]); // a cache had it, or none can

let token = "";
let refused = ""; // what is said of a token that was not accepted
let waitsForToken = false; // the server answers nothing without one
let history = []; // {at, loaded, computed}: totals since the server started
let before = ""; // the epoch of the server that the history is of
let isOperator = false; // the server knows by the token, or by a certificate of the browser
let meanings = null; // of the outcomes of blocks, by name
let tenants = []; // as they were shown last

const $ = (id) => document.getElementById(id);

// -- what is asked

async function ask(path, method = "GET", body = undefined) {
  const headers = {};
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method, headers, body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(10_000),
  });
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  const said = await answer.json().catch(() => ({ message: `status ${answer.status}`, hint: "" }));
  const error = new Error(said.hint ? `${said.message}. ${said.hint}` : said.message);
  error.status = answer.status;
  throw error;
}

async function update() {
  let status;
  const used = token;
  try {
    meanings ??= await ask("/dashboard/outcomes.json");
    status = await ask("/v1/status");
    if (token !== used) return; // entered meanwhile, and asked with
    if (token && !status.sessions) forgetToken();
    show(status);
    problem(refused);
  } catch (error) {
    if (token !== used) return;
    say("uptime", "");
    waitsForToken = error.status === 401;
    if (waitsForToken) {
      if (token) forgetToken();
      say("state", "token needed");
      problem(`${refused} The server wants its admin token: enter it above.`.trim());
    } else {
      say("state", "no answer");
      problem(`The server does not answer (${error.message}). This page asks again by itself.`);
    }
  }
  say("token-state", token ? "in use" : refused ? "not accepted" : "");
  if (status) await showRequests();
}

// Each use of a token that is not the server's would count as an attack.
function forgetToken() {
  token = "";
  refused = "The server did not accept this token.";
}

async function showRequests() {
  if (!isOperator) return fill("requests", [message("Enter the admin token to see requests.")]);
  try {
    const requests = await ask("/v1/explain?last=100");
    requests.sort((one, other) => other.prompt_s - one.prompt_s);
    fill("requests", requests.slice(0, 20).map(requestRow), "None has finished yet.");
  } catch (error) {
    fill("requests", [message(error.message)]);
  }
}

// -- what is shown

function show(status) {
  isOperator = status.sessions !== null;
  document.title = `kvkeep ${status.name}`;
  say("server", `${status.name} ${status.version}`);
  say("state", status.stopping ? "stopping" : status.ready ? "ready" : "not ready");
  say("uptime", `, up for ${time(status.uptime_s)}`); // apart: a screen reader tells each new state
  remember(status);
  showGain(status);
  showMissed(status.prompt_blocks);
  showMemory(status);
  fill("tiers", status.tiers.map(tierRow), "None: `kvkeep serve --tier` adds one.");
  fill("sessions", status.sessions ? status.sessions.map(sessionRow)
    : [message("Enter the admin token to see engines.")], "None is connected.");
}

function connected(status) {
  return Object.values(status.open_sessions).reduce((sum, each) => sum + each, 0);
}

function showGain(status) {
  const f = status.figures;
  const prompt = f.tokens_loaded + f.tokens_local + f.tokens_computed;
  const tiles = [
    ["Time saved", time(f.saved_s), "computing avoided, less loading" +
      (f.tokens_unpriced ? `; not known for ${count(f.tokens_unpriced)} tokens` : "")],
    ["Tokens loaded and used", count(f.tokens_loaded), share(f.tokens_loaded, prompt)],
    ["Tokens computed", count(f.tokens_computed), share(f.tokens_computed, prompt)],
    ["In the engines' own caches", count(f.tokens_local), share(f.tokens_local, prompt)],
    ["Requests", count(f.requests), `sessions of engines: ${connected(status)}`],
  ];
  $("gain").replaceChildren(...tiles.map(([name, value, small]) => {
    const tile = element("div", "", [element("dt", name), element("dd", value)]);
    tile.lastChild.append(" ", element("small", small));
    return tile;
  }));
}

function showMissed(blocks) {
  const missed = Object.entries(blocks)
    .filter(([name, many]) => many && !NO_MISS.has(name)).sort((one, other) => other[1] - one[1]);
  const total = missed.reduce((sum, [, many]) => sum + many, 0);
  const items = missed.map(([name, many]) => {
    const meter = element("meter");
    meter.max = total;
    meter.value = many;
    meter.setAttribute("aria-label", `${name}: ${many} of ${total} blocks`);
    const label = element("span", name.replaceAll("_", " "),
      [element("small", meanings[name] ?? "", [], "why")]);
    return element("li", "", [label, meter, element("span", count(many), [], "count")]);
  });
  if (!items.length) items.push(element("li", "No block of a prompt has missed yet."));
  $("missed").replaceChildren(...items);
}

function showMemory(status) {
  const pool = status.pool;
  const used = Object.values(pool.used_bytes).reduce((sum, each) => sum + each, 0);
  const evicted = Object.values(status.evicted_blocks).reduce((sum, each) => sum + each, 0);
  const age = status.evicted_age_s;
  say("memory-words", `${bytes(used)} of ${bytes(pool.filled_bytes)} in use, ` +
    `${count(Object.values(pool.blocks).reduce((sum, each) => sum + each, 0))} blocks; ` +
    `${count(evicted)} evicted` + (age === null ? "" : `, ${time(age)} after their last use`) +
    (pool.degraded ? `. Smaller than asked for: ${pool.degraded}` : ""));
  drawMap("memory-map", "Memory by tenant", pool,
    status.largest_tenants.map((tenant) => [tenant.tenant, tenant.usage_bytes]));
  tenants = status.largest_tenants;
  fill("tenants", tenants.map(tenantRow), "None has blocks.");
  const models = [...status.models].sort((one, other) => other.usage_bytes - one.usage_bytes);
  drawMap("model-map", "Memory by model", pool,
    models.map((model) => [model.model, model.usage_bytes]));
  fill("models", models.map(modelRow), "None yet.");
}

// A bar as wide as the pool, with a part for each owner of blocks.
function drawMap(name, title, pool, owners) {
  const used = owners.filter(([, many]) => many);
  const parts = used.map(([owner, many], number) => {
    const part = element("span", "", [], `s${number % SHADES}`);
    part.style.width = `${(100 * many) / Math.max(1, pool.filled_bytes)}%`;
    part.title = `${owner}: ${bytes(many)}`;
    return part;
  });
  $(name).replaceChildren(...parts);
  $(name).setAttribute("aria-label", `${title}: ` +
    (used.map(([owner, many]) => `${owner} ${bytes(many)}`).join(", ") || "empty"));
}

// A row of a table below a map: its first cell shows the colour of the owner's part.
function ownerRow(many, number, cells) {
  const made = row(cells);
  if (many) made.className = `owner s${number % SHADES}`;
  return made;
}

function tenantRow(tenant, number) {
  const button = element("button", "Change");
  button.disabled = !isOperator;
  button.setAttribute("aria-label", `Change quota and limit of ${tenant.tenant}`);
  if (!isOperator) button.title = "Enter the admin token first";
  button.addEventListener("click", () => openChange(tenant.tenant));
  const own = (value, isOwn) => (value === null ? "none" : bytes(value) + (isOwn ? "" : " (default)"));
  return ownerRow(tenant.usage_bytes, number, [
    tenant.tenant, bytes(tenant.usage_bytes), own(tenant.quota_bytes, tenant.own_quota),
    own(tenant.limit_bytes, tenant.own_limit), count(tenant.figures.tokens_loaded),
    time(tenant.figures.saved_s), button]);
}

function modelRow(model, number) {
  return ownerRow(model.usage_bytes, number, [
    model.model, bytes(model.usage_bytes), count(model.figures.requests),
    count(model.figures.tokens_loaded), count(model.figures.tokens_computed),
    time(model.figures.saved_s)]);
}

function tierRow(tier) {
  const state = tier.problem && tier.state !== "ok" ? `${tier.state}: ${tier.problem}` : tier.state;
  const made = row([
    tier.tier, state, bytes(tier.used_bytes),
    tier.capacity_bytes ? bytes(tier.capacity_bytes) : "not known",
    bytes(tier.counts.promoted_bytes), bytes(tier.counts.written_bytes), count(tier.counts.errors)]);
  made.children[1].className = "why"; // a problem may be long
  if (tier.state === "set aside") made.className = "bad";
  return made;
}

function sessionRow(session) {
  return row([
    session.engine, session.model, session.role, String(session.pid),
    session.plane.replace("_", " "), session.identity, count(session.figures.tokens_loaded),
    time(session.figures.saved_s)]);
}

function requestRow(request) {
  const reasons = Object.entries(request.outcomes)
    .filter(([name, many]) => many && !NO_MISS.has(name))
    .sort((one, other) => other[1] - one[1])
    .map(([name, many]) => `${count(many)} ${name.replaceAll("_", " ")}`).join(", ");
  const made = row([
    request.request, request.tenant, count(request.prompt_tokens), count(request.tokens_loaded),
    count(request.tokens_computed), `${request.prompt_s.toFixed(2)} s`, reasons || "none"]);
  made.lastChild.className = "why";
  return made;
}

// -- charts

function remember(status) {
  if (before !== status.epoch) history = []; // another server: its counters began again
  before = status.epoch;
  const f = status.figures;
  history.push({ at: Date.now(), loaded: f.tokens_loaded, computed: f.tokens_computed });
  history = history.slice(-KEPT - 1);
  const rates = history.slice(1).map((now, index) => {
    const last = history[index];
    const seconds = Math.max(0.001, (now.at - last.at) / 1000);
    return {
      loaded: (now.loaded - last.loaded) / seconds,
      computed: (now.computed - last.computed) / seconds,
    };
  });
  const loaded = rates.map((each) => each.loaded);
  const computed = rates.map((each) => each.computed);
  draw("tokens", [["a", "loaded", loaded], ["b", "computed", computed]], (v) => `${count(v)}/s`);
  const shares = rates.map((each) => {
    const all = each.loaded + each.computed;
    return all ? (100 * each.loaded) / all : 0;
  });
  draw("share", [["a", "loaded", shares]], (value) => `${Math.round(value)} %`, 100);
}

function draw(name, lines, words, top = 0) {
  const highest = top || Math.max(1, ...lines.flatMap(([, , values]) => values));
  const paths = lines.map(([kind, , values]) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const shown = Math.max(values.length, 30);
    const x = (index) => (600 * (index + shown - values.length)) / (shown - 1);
    path.setAttribute("d", values.map((value, index) =>
      `${index ? "L" : "M"}${x(index).toFixed(1)},${(175 - (170 * value) / highest).toFixed(1)}`)
      .join(""));
    path.setAttribute("class", kind);
    return path;
  });
  const last = (values) => words(values.length ? values[values.length - 1] : 0);
  $(`${name}-chart`).replaceChildren(...paths);
  $(`${name}-chart`).setAttribute("aria-label",
    lines.map(([, label, values]) => `${label}: ${last(values)} now`).join(", "));
  $(`${name}-legend`).replaceChildren(...lines.map(([kind, label, values]) =>
    element("span", `${label} ${last(values)}`, [], kind)));
}

// -- quota and limit

let changed = null;

function openChange(name) {
  changed = tenants.find((each) => each.tenant === name);
  $("change-tenant").textContent = name;
  $("change-problem").textContent = "";
  // As it was set: the one in force may be scaled down for now.
  $("quota").value = changed.own_quota ? changed.set_quota_bytes / GIB : "";
  $("limit").value = changed.own_limit ? changed.limit_bytes / GIB : "";
  $("change").showModal();
}

async function saveChange(event) {
  event.preventDefault();
  try {
    const wanted = { quota: gibibytes($("quota").value, "quota"),
      limit: gibibytes($("limit").value, "limit") };
    // A limit may never be below the quota, not even in between.
    const grows = wanted.limit === null || wanted.limit >= (changed.limit_bytes ?? Infinity);
    for (const what of grows ? ["limit", "quota"] : ["quota", "limit"]) {
      const body = { [`${what}_bytes`]: wanted[what] };
      await ask(`/v1/tenants/${encodeURIComponent(changed.tenant)}/${what}`, "PUT", body);
    }
    $("change").close();
    await update();
  } catch (error) {
    $("change-problem").textContent = error.message;
  }
}

// The button that opened the dialog may have been replaced meanwhile.
function focusChanged() {
  [...$("tenants").querySelectorAll("button")]
    .find((each) => each.ariaLabel.endsWith(` ${changed.tenant}`))?.focus();
}

function gibibytes(text, what) {
  if (!text.trim()) return null;
  const value = Number(text.trim());
  if (!Number.isFinite(value) || value < 0) throw new Error(`${what}: expected a number of GiB`);
  return Math.round(value * GIB);
}

// -- words

function element(name, text = "", children = [], kind = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}

// The first cell names the row.
function row(cells) {
  const made = element("tr", "", cells.map((cell, index) => {
    const name = index ? "td" : "th";
    return typeof cell === "string" ? element(name, cell) : element(name, "", [cell]);
  }));
  made.firstChild.scope = "row";
  return made;
}

// A row that is a sentence.
function message(text) {
  const cell = element("td", text);
  cell.colSpan = 99;
  return element("tr", "", [cell]);
}

// Rows are replaced only if they changed, so that focus stays where it is.
function fill(id, rows, ifNone = "") {
  const made = rows.length || !ifNone ? rows : [message(ifNone)];
  const body = element("tbody", "", made);
  if (body.innerHTML === $(id).innerHTML) return;
  const focused = $(id).contains(document.activeElement) && document.activeElement.ariaLabel;
  $(id).replaceChildren(...body.children);
  if (focused) [...$(id).querySelectorAll("button")].find((each) => each.ariaLabel === focused)?.focus();
}

function problem(text) {
  if ($("problem").textContent === text) return;
  $("problem").hidden = !text;
  say("problem", text);
}

// Only what changed: a screen reader reads aloud what is set in a status or an alert.
function say(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function count(value) {
  return Math.round(value).toLocaleString("en");
}

function share(part, all) {
  return all ? `${((100 * part) / all).toFixed(1)} % of prompts` : "";
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

function time(seconds) {
  if (Math.abs(seconds) < 120) return `${(Math.round(10 * seconds) / 10 || 0).toFixed(1)} s`;
  if (Math.abs(seconds) < 7200) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  $("token").value = "";
  refused = "";
  waitsForToken = false;
  update();
});
$("change-form").addEventListener("submit", saveChange);
$("change-form").addEventListener("input", () => say("change-problem", ""));
$("cancel").addEventListener("click", () => $("change").close());
$("change").addEventListener("close", focusChanged);

// One at a time: the next question is asked when the last one was answered.
(async function run() {
  for (;;) {
    if (!document.hidden && !waitsForToken) await update();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
})();
