// The page of the server: chat, draw, transcribe. Whatever comes from a model or a user is put
// into the page as text (textContent), never as markup.

const $ = (selector, within = document) => within.querySelector(selector);
const conversation = [];
let key = sessionStorage.getItem("key") ?? "";

// --- asking the server --------------------------------------------------------------------------

async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  if (answer.status === 401) $("#login").hidden = false;
  throw new Error(told?.error?.message ?? `the server answers ${answer.status}`);
}

function asJson(body, signal) {
  const headers = { "Content-Type": "application/json" };
  return { method: "POST", headers, body: JSON.stringify(body), signal };
}

// The events of a stream: objects, until it ends.
async function* events(path, options) {
  const answer = await ask(path, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((one) => one.startsWith("data: "));
      if (!line || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function tell(message) {
  $("#notice").textContent = message;
  $("#notice").hidden = !message;
}

// A form that does something long: its buttons, and a signal that Stop and Escape give.
function doing(form, work) {
  const go = $(".go", form), stop = $(".stop", form), state = $(".state", form);
  let abort = null;
  const show = (busy) => {
    go.disabled = busy;
    stop.hidden = !busy;
  };
  const end = () => abort?.abort();
  stop.addEventListener("click", end);
  form.addEventListener("keydown", (event) => event.key === "Escape" && end());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (abort) return;
    abort = new AbortController();
    const begun = performance.now();
    tell("");
    show(true);
    try {
      const said = await work(abort.signal, (text) => (state.textContent = text));
      const seconds = ((performance.now() - begun) / 1000).toFixed(1);
      state.textContent = `${said ?? "done"}, ${seconds} s`;
    } catch (error) {
      state.textContent = abort.signal.aborted ? "stopped" : "";
      if (!abort.signal.aborted) tell(error.message);
    } finally {
      abort = null;
      show(false);
    }
  });
}

// What is filled in of a form's options: {name: value}, numbers as numbers.
function options(form, ...names) {
  const out = {};
  for (const name of names) {
    const field = form.elements[name];
    if (field.value === "") continue;
    out[name] = field.type === "number" ? field.valueAsNumber : field.value;
  }
  return out;
}

function element(tag, text = "", name = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

// --- chat ---------------------------------------------------------------------------------------

function message(role, text) {
  const box = element("article", "", role);
  const said = element("span", text);
  box.append(element("b", role === "user" ? "You" : "Model"), said);
  $("#messages").append(box);
  box.scrollIntoView({ block: "end" });
  return said;
}

doing($("#chat-form"), async (signal, state) => {
  const form = $("#chat-form"), say = $("#say"), log = $("#messages");
  const system = form.elements.system.value.trim();
  conversation.push({ role: "user", content: say.value });
  message("user", say.value);
  say.value = "";
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation];
  const body = { messages, stream: true, ...options(form, "model", "temperature", "max_tokens") };
  const said = message("assistant", "");
  let text = "", tokens = 0;
  state("reading …");
  try {
    for await (const event of events("v1/chat/completions", asJson(body, signal))) {
      const piece = event.choices[0]?.delta.content ?? "";
      if (!piece) continue;
      text += piece;
      tokens += 1;
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      said.append(piece);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
      state(`${tokens} tokens`);
    }
  } finally {
    if (text) conversation.push({ role: "assistant", content: text });
    else {
      said.parentElement.remove();
      say.value ||= conversation.pop().content; // to be sent again
    }
  }
  return `${tokens} tokens`;
});

$("#say").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("#chat-form").requestSubmit();
});

$("#new-chat").addEventListener("click", () => {
  $("#chat-form .stop").click();
  conversation.length = 0;
  $("#messages").replaceChildren();
  $("#say").focus();
});

// --- draw ---------------------------------------------------------------------------------------

doing($("#draw-form"), async (signal, state) => {
  const form = $("#draw-form"), bar = $("progress", form);
  const chosen = ["prompt", "model", "size", "steps", "n", "seed", "negative_prompt"];
  const body = { ...options(form, ...chosen), stream: true, partial_images: 3 };
  const shown = [];
  const show = (index, event, finished) => {
    const figure = (shown[index] ??= newPicture(body.prompt));
    const source = `data:image/${event.output_format};base64,${event.b64_json}`;
    $("img", figure).src = source;
    if (!finished) return;
    const link = element("a", "Save");
    link.href = source;
    link.download = `picture.${event.output_format}`;
    $("figcaption", figure).append(" ", link);
  };
  let done = 0;
  bar.removeAttribute("value");
  bar.hidden = false;
  state("beginning …");
  try {
    for await (const event of events("v1/images/generations", asJson(body, signal))) {
      if (event.type === "image_generation.progress") {
        bar.max = event.steps;
        bar.value = event.step;
        state(`step ${event.step} of ${event.steps}`);
      } else if (event.type === "image_generation.partial_image") show(done, event, false);
      else if (event.type === "image_generation.completed") show(done++, event, true);
    }
  } finally {
    bar.hidden = true;
    shown.slice(done).forEach((figure) => figure.remove());
  }
});

function newPicture(prompt) {
  const figure = element("figure"), image = element("img");
  image.alt = prompt;
  figure.append(image, element("figcaption", prompt));
  $("#pictures").prepend(figure);
  return figure;
}

// --- transcribe ---------------------------------------------------------------------------------

doing($("#transcribe-form"), async (signal, state) => {
  const form = $("#transcribe-form"), body = new FormData(), list = $("#segments");
  for (const [name, value] of Object.entries(options(form, "model", "language"))) {
    body.append(name, value);
  }
  body.append("file", form.elements.file.files[0]);
  body.append("response_format", "verbose_json");
  body.append("stream", "true");
  list.replaceChildren();
  $("#copy").hidden = true;
  state("listening …");
  const task = form.elements.translate.checked ? "translations" : "transcriptions";
  for await (const event of events(`v1/audio/${task}`, { method: "POST", body, signal })) {
    if (event.type !== "transcript.text.segment") continue;
    const item = element("li");
    const time = element("time", `${clock(event.start)} – ${clock(event.end)}`);
    item.append(time, element("span", event.text.trim()));
    list.append(item);
    state(`up to ${clock(event.end)}`);
  }
  $("#copy").hidden = !list.children.length;
  return `${list.children.length} segments`;
});

function clock(seconds) {
  const minutes = Math.floor(seconds / 60);
  return `${minutes}:${(seconds - 60 * minutes).toFixed(1).padStart(4, "0")}`;
}

$("#copy").addEventListener("click", async () => {
  const lines = [...document.querySelectorAll("#segments span")].map((one) => one.textContent);
  await navigator.clipboard.writeText(lines.join("\n")).catch((error) => tell(error.message));
});

// --- tabs, theme, key ---------------------------------------------------------------------------

const tabs = [...document.querySelectorAll("[role=tab]")];

function open(tab, focus = false) {
  for (const one of tabs) {
    const isOpen = one === tab;
    one.setAttribute("aria-selected", isOpen);
    one.tabIndex = isOpen ? 0 : -1;
    $(`#${one.getAttribute("aria-controls")}`).hidden = !isOpen;
  }
  if (focus) tab.focus();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    const there = tabs.filter((one) => !one.hidden), at = there.indexOf(tab);
    const steps = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 };
    if (event.key in steps) open(there.at(steps[event.key] % there.length), true);
  });
}

const themes = ["system", "light", "dark"];

function wear(theme) {
  document.documentElement.dataset.theme = theme;
  $("#theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("theme", theme);
}

$("#theme").addEventListener("click", () => {
  const now = themes.indexOf(document.documentElement.dataset.theme);
  wear(themes[(now + 1) % themes.length]);
});

$("#login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("#key").value;
  sessionStorage.setItem("key", key);
  $("#login").hidden = true;
  begin();
});

// Show what is served: a tab for each kind of model, and a choice where there are several.
async function begin() {
  tell("");
  const panels = { chat: "chat", pictures: "draw", speech: "transcribe" };
  try {
    const { data } = await (await ask("v1/models")).json();
    for (const [kind, panel] of Object.entries(panels)) {
      const names = data.filter((one) => one.kind === kind).map((one) => one.id);
      $(`#tab-${panel}`).hidden = !names.length;
      const list = $(`#${panel} .models`);
      list.hidden = names.length < 2;
      $("select", list).replaceChildren(...names.map((name) => new Option(name, name)));
    }
    open(tabs.find((tab) => !tab.hidden) ?? tabs[0]);
  } catch (error) {
    tell(error.message);
  }
}

wear(localStorage.getItem("theme") ?? "system");
begin();
