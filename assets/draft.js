// Draws what the draft did, in the mode that has one; the header asks the server for it.
const part = (name) => element.querySelector(`[data-part="${name}"]`);
let drawn = ""; // what the panel shows: nothing is drawn twice

document.addEventListener("outrider-live", ({ detail: { draft } }) => {
  if (!element.isConnected) return;
  const wanted = JSON.stringify(draft);
  if (drawn === wanted) return;
  drawn = wanted;
  const panel = element.querySelector("section");
  panel.hidden = !draft;
  if (!draft) return;
  for (const [name, text] of Object.entries(draft.figures)) part(name).textContent = text;
  part("parked").hidden = !draft.parked;
  panel.classList.toggle("parked", draft.parked);
  drawBars("accepted", draft.accepted, 0, Math.max(...draft.accepted));
  drawBars("positions", draft.positions, 1, 1);
  panel.querySelector(".or-bar").classList.toggle("empty", !draft.split);
  panel.querySelectorAll(".or-seg").forEach((segment, i) => (segment.style.flex = draft.split?.[i] ?? 0));
});

// A bar each share, the tallest possible one being `top`; the first stands for the number `first`.
function drawBars(name, shares, first, top) {
  const figure = element.querySelector(`[data-bars="${name}"]`);
  const picture = figure.querySelector("svg");
  figure.classList.toggle("empty", !shares.length);
  const bars = shares.map((share, i) => `M${i + 0.18} 40V${(40 - (39 * share) / top).toFixed(1)}H${i + 0.82}V40Z`);
  picture.setAttribute("viewBox", `0 0 ${shares.length || 1} 40`);
  picture.firstElementChild.setAttribute("d", bars.join(""));
  const words = shares.map((share, i) => `${first + i}: ${Math.round(100 * share)} %`);
  picture.setAttribute("aria-label", words.join(", "));
  figure.title = words.join("\n");
  part(`${name}-first`).textContent = shares.length ? first : "";
  part(`${name}-last`).textContent = shares.length > 1 ? first + shares.length - 1 : "";
}
