// Selects an option of the <select> that is or contains the element, by label, else by value; returns why not, or null.
function (wanted) {
  const list = this.nodeType === 1 ? this.closest("select") : null;
  if (!list) return "this is no list of options";
  if (list.disabled) return "the list is disabled";
  const options = [...list.options];
  const option = options.find((o) => o.label.trim() === wanted.trim()) || options.find((o) => o.value === wanted);
  if (!option) return "there is no such option";
  if (option.disabled) return "the option is disabled";
  list.focus();
  if (option.selected && !list.multiple) return null;
  option.selected = true;
  list.dispatchEvent(new Event("input", {bubbles: true, composed: true}));
  list.dispatchEvent(new Event("change", {bubbles: true}));
  return null;
}
