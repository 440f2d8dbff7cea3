// Draws the heat map of the experts; the header asks the server for it.
const part = (name) => element.querySelector(`[data-part="${name}"]`);

document.addEventListener("outrider-live", ({ detail: live }) => {
  if (!element.isConnected) return;
  if (part("asked").textContent !== live.figures.asked) part("asked").textContent = live.figures.asked;
  drawCells(live.cells);
});

const STATES = ["absent", "resident", "flying", "hit", "missed"];
let grid = null; // how the cells lie on the canvas, for the tooltip

let drawn = ""; // what the canvas shows: nothing is drawn twice

function drawCells(cells) {
  const canvas = part("map");
  const room = canvas.parentElement.clientWidth;
  if (!cells || !room) return;
  const wanted = [cells.states, cells.columns, room, document.body.classList.contains("dark")].join();
  if (wanted === drawn) return;
  drawn = wanted;
  const states = atob(cells.states);
  const ratio = window.devicePixelRatio || 1;
  const cell = Math.max(1, Math.min(Math.floor((room * ratio) / cells.columns), Math.round(24 * ratio)));
  const tall = Math.max(Math.round(2 * ratio), Math.min(cell, Math.round(13 * ratio), Math.floor((240 * ratio) / cells.rows)));
  const gap = Math.min(cell, tall) >= 5 * ratio ? Math.max(1, Math.round(ratio)) : 0;
  grid = { ...cells, states, cell: cell / ratio, tall: tall / ratio };
  canvas.width = cell * cells.columns;
  canvas.height = tall * cells.rows;
  canvas.style.width = `${canvas.width / ratio}px`;
  canvas.style.height = `${canvas.height / ratio}px`;
  const style = getComputedStyle(element);
  const colours = STATES.map((name) => style.getPropertyValue(`--or-${name}`).trim());
  const counts = [0, 0, 0, 0, 0];
  const pen = canvas.getContext("2d");
  for (let i = 0; i < states.length; i++) {
    const state = states.charCodeAt(i);
    counts[state]++;
    pen.fillStyle = colours[state];
    pen.fillRect((i % cells.columns) * cell, Math.floor(i / cells.columns) * tall, cell - gap, tall - gap);
  }
  STATES.forEach((name, i) => (part(`count-${name}`).textContent = counts[i].toLocaleString("en")));
  canvas.setAttribute("aria-label", STATES.map((name, i) => `${counts[i]} ${name}`).join(", "));
}

part("map").addEventListener("mousemove", (event) => {
  if (!grid) return;
  const column = Math.floor(event.offsetX / grid.cell);
  const row = Math.floor(event.offsetY / grid.tall);
  const state = grid.states.charCodeAt(row * grid.columns + column);
  if (column < grid.columns && row < grid.rows)
    event.target.title = `layer ${row}, expert ${column}: ${part(`name-${STATES[state]}`).textContent}`;
});
