// The button of a notice, which comes and goes with it.
element.addEventListener("click", (event) => {
  if (event.target.closest("button")) trigger("again");
});
