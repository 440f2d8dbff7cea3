// Draws the live figures; the header asks the server for them.
const part = (name) => element.querySelector(`[data-part="${name}"]`);

document.addEventListener("outrider-live", ({ detail: live }) => {
  if (!element.isConnected) return;
  for (const [name, text] of Object.entries(live.figures)) {
    const slot = part(name);
    if (slot && slot.textContent !== text) slot.textContent = text;
  }
  drawRates(live.rates);
});

let drawn = ""; // what the chart shows

function drawRates(rates) {
  if (drawn === rates.join()) return;
  drawn = rates.join();
  const line = part("line");
  const area = part("area");
  part("chart").classList.toggle("empty", rates.length < 2);
  if (rates.length < 2) return;
  const top = Math.max(...rates) * 1.15;
  const points = rates.map((rate, i) => [(300 * i) / (rates.length - 1), 56 - (52 * rate) / top]);
  const path = "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  line.setAttribute("d", path);
  area.setAttribute("d", `${path}L300 60L0 60Z`);
  part("chart-low").textContent = Math.min(...rates).toFixed(1);
  part("chart-high").textContent = Math.max(...rates).toFixed(1);
}
