// The dashboard: asks the admin API every two seconds and shows the answers. The token is kept in a
// variable of this page only, and is sent in a header. All text is set as text, never as HTML.

const EVERY_MS = 2000;
const KEPT = 300; // points of the charts: ten minutes
const GIB = 2 ** 30;
const SHADES = 6;

let token = "";
let history = []; // {at, loaded, computed}: totals since the server started
let before = ""; // the epoch of the server that the history is of

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
  try {
    const status = await ask("/v1/status");
    show(status);
    problem("");
  } catch (error) {
    if (error.status === 401) problem("The server wants its admin token: enter it above.");
    else {
      $("state").textContent = "no answer";
      problem(`The server does not answer (${error.message}). This page asks again by itself.`);
    }
    return;
  }
  await showRequests();
}

async function showRequests() {
  if (!token) return fill("requests", [row(["Enter the admin token to see requests."])]);
  try {
    const requests = await ask("/v1/explain?last=100");
    requests.sort((one, other) => other.tokens_computed - one.tokens_computed);
    fill("requests", requests.slice(0, 20).map(requestRow), "None has finished yet.");
  } catch (error) {
    fill("requests", [row([error.message])]);
  }
}

// -- what is shown

function show(status) {
  document.title = `kvkeep ${status.name}`;
  $("server").textContent = `${status.name} ${status.version}`;
  const state = status.stopping ? "stopping" : status.ready ? "ready" : "not ready";
  $("state").textContent = `${state}, up for ${time(status.uptime_s)}`;
  remember(status);
  showGain(status);
  showMissed(status.prompt_blocks);
  showMemory(status);
  fill("models", status.models.map((model) => row([
    model.model, bytes(model.usage_bytes), count(model.figures.requests), count(model.figures.tokens_loaded),
    count(model.figures.tokens_computed), time(model.figures.saved_s)])), "None yet.");
  fill("tiers", status.tiers.map(tierRow), "None: `kvkeep serve --tier` adds one.");
  fill("sessions", status.sessions ? status.sessions.map(sessionRow)
    : [row(["Enter the admin token to see engines."])], "None is connected.");
}

function connected(status) {
  return Object.values(status.open_sessions).reduce((sum, each) => sum + each, 0);
}

function showGain(status) {
  const f = status.figures;
  const prompt = f.tokens_loaded + f.tokens_local + f.tokens_computed;
  const tiles = [
    ["Time saved", time(f.saved_s), "computing avoided, less loading"],
    ["Tokens loaded and used", count(f.tokens_loaded), share(f.tokens_loaded, prompt)],
    ["Tokens computed", count(f.tokens_computed), share(f.tokens_computed, prompt)],
    ["In the engines' own caches", count(f.tokens_local), share(f.tokens_local, prompt)],
    ["Requests", count(f.requests), `processes connected: ${connected(status)}`],
  ];
  $("gain").replaceChildren(...tiles.map(([name, value, small]) => {
    const tile = element("div", "", [element("dt", name), element("dd", value)]);
    tile.lastChild.append(" ", element("small", small));
    return tile;
  }));
}

function showMissed(blocks) {
  const given = new Set(["local", "loaded", "last"]);
  const missed = Object.entries(blocks)
    .filter(([name, many]) => many && !given.has(name)).sort((one, other) => other[1] - one[1]);
  const total = missed.reduce((sum, [, many]) => sum + many, 0);
  const items = missed.map(([name, many]) => {
    const meter = element("meter");
    meter.max = total;
    meter.value = many;
    meter.setAttribute("aria-label", `${name}: ${many} of ${total} blocks`);
    const label = element("span", name.replaceAll("_", " "));
    return element("li", "", [label, meter, element("span", count(many), [], "count")]);
  });
  if (!items.length) items.push(element("li", "No block of a prompt has missed yet."));
  $("missed").replaceChildren(...items);
}

function showMemory(status) {
  const pool = status.pool;
  const used = Object.values(pool.used_bytes).reduce((sum, each) => sum + each, 0);
  $("memory-words").textContent = `${bytes(used)} of ${bytes(pool.filled_bytes)} in use, ` +
    `${count(Object.values(pool.blocks).reduce((sum, each) => sum + each, 0))} blocks`;
  drawMap("memory-map", "Memory by tenant", pool,
    status.largest_tenants.map((tenant) => [tenant.tenant, tenant.usage_bytes]));
  drawMap("model-map", "Memory by model", pool,
    status.models.map((model) => [model.model, model.usage_bytes]));
  fill("tenants", status.largest_tenants.map(tenantRow), "None has blocks.");
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

function tenantRow(tenant) {
  const button = element("button", "Change");
  button.disabled = !token;
  button.setAttribute("aria-label", `Change quota and limit of ${tenant.tenant}`);
  if (!token) button.title = "Enter the admin token first";
  button.addEventListener("click", () => openChange(tenant));
  const own = (value, isOwn) => (value === null ? "none" : bytes(value) + (isOwn ? "" : " (default)"));
  return row([
    tenant.tenant, bytes(tenant.usage_bytes), own(tenant.quota_bytes, tenant.own_quota),
    own(tenant.limit_bytes, tenant.own_limit), count(tenant.figures.tokens_loaded),
    time(tenant.figures.saved_s), button]);
}

function tierRow(tier) {
  const state = tier.problem && tier.state !== "ok" ? `${tier.state}: ${tier.problem}` : tier.state;
  const made = row([
    tier.tier, state, bytes(tier.used_bytes),
    tier.capacity_bytes ? bytes(tier.capacity_bytes) : "not known",
    bytes(tier.counts.promoted_bytes), bytes(tier.counts.written_bytes), count(tier.counts.errors)]);
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
  const reasons = Object.entries(request.outcomes).filter(([, many]) => many)
    .sort((one, other) => other[1] - one[1])
    .map(([name, many]) => `${count(many)} ${name.replaceAll("_", " ")}`).join(", ");
  const made = row([
    request.request, request.tenant, count(request.prompt_tokens), count(request.tokens_loaded),
    count(request.tokens_computed), reasons]);
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

function openChange(tenant) {
  changed = tenant;
  $("change-tenant").textContent = tenant.tenant;
  $("change-problem").textContent = "";
  $("quota").value = tenant.own_quota ? tenant.quota_bytes / GIB : "";
  $("limit").value = tenant.own_limit ? tenant.limit_bytes / GIB : "";
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

function row(cells) {
  return element("tr", "", cells.map((cell) =>
    typeof cell === "string" ? element("td", cell) : element("td", "", [cell])));
}

// Rows are replaced only if they changed, so that focus stays where it is.
function fill(id, rows, ifNone = "") {
  const made = rows.length || !ifNone ? rows : [row([ifNone])];
  const body = element("tbody", "", made);
  if (body.innerHTML === $(id).innerHTML) return;
  const focused = $(id).contains(document.activeElement) && document.activeElement.ariaLabel;
  $(id).replaceChildren(...body.children);
  if (focused) [...$(id).querySelectorAll("button")].find((each) => each.ariaLabel === focused)?.focus();
}

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
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
  if (Math.abs(seconds) < 120) return `${seconds.toFixed(1)} s`;
  if (Math.abs(seconds) < 7200) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  $("token").value = "";
  $("token").placeholder = token ? "in use" : "";
  update();
});
$("change-form").addEventListener("submit", saveChange);
$("cancel").addEventListener("click", () => $("change").close());

// One at a time: the next question is asked when the last one was answered.
(async function run() {
  for (;;) {
    if (!document.hidden) await update();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
})();
