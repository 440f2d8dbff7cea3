// Buttons of the mode switch: a click asks for a setting, the arrow keys move through a group of choices as they do in any.
element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-set]:not([disabled])");
  if (!button || button.matches("[role=radio][aria-checked=true]")) return;
  trigger("choose", { setting: button.dataset.set, value: button.dataset.value });
});

const STEPS = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };

element.addEventListener("keydown", (event) => {
  const group = event.target.closest("[role=radiogroup]");
  if (!group || !(event.key in STEPS)) return;
  event.preventDefault();
  const able = [...group.querySelectorAll("[role=radio]:not([disabled])")];
  const next = able[(able.indexOf(event.target) + STEPS[event.key] + able.length) % able.length];
  next.focus();
  next.click();
});
