// One listener for the whole list, so it survives every redraw.
element.addEventListener("click", (event) => {
  const row = event.target.closest("[data-id]");
  if (!row) return;
  if (!event.target.closest(".or-delete")) trigger("pick", { id: row.dataset.id });
  else if (confirm(`Delete “${row.querySelector("span").textContent}”?`)) trigger("remove", { id: row.dataset.id });
});
element.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches("[data-id]")) trigger("pick", { id: event.target.dataset.id });
});
