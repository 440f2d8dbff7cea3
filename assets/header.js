// Opens and closes the side panels, and switches between light and dark; both are remembered by this browser.
const root = document.querySelector(".gradio-container");
const wide = window.matchMedia("(min-width: 1100px)");
const narrow = window.matchMedia("(max-width: 760px)");

function remembered(name, otherwise) {
  return localStorage.getItem(`outrider-${name}`) ?? otherwise;
}

function setOpen(side, open, keep = true) {
  root.classList.toggle(`or-open-${side}`, open);
  element.querySelector(`[data-side="${side}"]`).setAttribute("aria-expanded", open);
  if (keep) localStorage.setItem(`outrider-${side}`, open ? "open" : "closed");
}

function arrange() {
  setOpen("left", !narrow.matches && remembered("left", "open") === "open", false);
  setOpen("right", wide.matches && remembered("right", "open") === "open", false);
}

function paint(theme) {
  document.documentElement.classList.toggle("dark", theme === "dark");
  document.body.classList.toggle("dark", theme === "dark");
}

const system = window.matchMedia("(prefers-color-scheme: dark)");
const chosen = () => remembered("theme", system.matches ? "dark" : "light");

element.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.side) {
    const side = button.dataset.side;
    const open = !root.classList.contains(`or-open-${side}`);
    if (open && narrow.matches) setOpen(side === "left" ? "right" : "left", false, false);
    setOpen(side, open, !narrow.matches);
  } else {
    localStorage.setItem("outrider-theme", chosen() === "dark" ? "light" : "dark");
    paint(chosen());
  }
});
// On a phone a panel covers the chat: a tap beside it, or choosing a conversation, puts it away.
document.addEventListener("click", (event) => {
  const beside = !event.target.closest("#or-left, #or-right, #or-header, [role=listbox], dialog");
  const picked = event.target.closest("#or-list [data-id], #or-new") && !event.target.closest(".or-delete");
  if (narrow.matches && (beside || picked)) arrange();
  else if (!wide.matches && beside) setOpen("right", false, false);
});
system.addEventListener("change", () => paint(chosen()));
wide.addEventListener("change", arrange);
narrow.addEventListener("change", arrange);
arrange();
paint(chosen());

// The live figures: asked for twice a second while something happens, once a second otherwise, not at all while the page
// is hidden. Whoever draws them listens for `outrider-live`.
let version = null;
let timer = null;

async function ask() {
  clearTimeout(timer);
  if (!element.isConnected) return;
  let pause = 1000;
  if (!document.hidden) {
    try {
      const live = await server.figures();
      if (!live?.figures) throw new Error("no figures");
      showStatus(live.phase, live.status, live.model);
      showProgress(live);
      document.dispatchEvent(new CustomEvent("outrider-live", { detail: live }));
      showFailure(live.failure);
      if (version !== live.version) trigger("refresh");
      version = live.version;
      if (live.phase === "writing" || live.phase === "loading") pause = 500;
    } catch (error) {
      showStatus("lost", "No connection", "");
      pause = 3000;
    }
  }
  timer = setTimeout(ask, pause);
}

let shown = ""; // what the header says: nothing is written twice, since every write makes the page lay itself out

function showStatus(phase, text, model) {
  if (shown === [phase, text, model].join("\n")) return;
  shown = [phase, text, model].join("\n");
  const pill = element.querySelector("#or-status");
  pill.dataset.phase = phase;
  pill.querySelector("b").textContent = model;
  pill.querySelector("span").textContent = text;
  pill.title = [model, text].filter(Boolean).join(": ");
}

let progress = "";

function showProgress({ phase, fraction }) {
  if (progress === [phase, fraction].join()) return;
  progress = [phase, fraction].join();
  const bar = element.querySelector("#or-progress");
  bar.classList.toggle("on", phase === "loading");
  bar.classList.toggle("unknown", fraction === null);
  bar.firstElementChild.style.width = `${100 * (fraction ?? 0.3)}%`;
}

function showFailure(text) {
  const banner = element.querySelector("#or-failure");
  if (banner.textContent === text) return;
  banner.hidden = !text;
  banner.textContent = text;
}

document.addEventListener("visibilitychange", () => document.hidden || ask());
ask();
