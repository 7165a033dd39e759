// The link of an action, or the field to fill in next: radio buttons and checkboxes first, because Enter in a text field
// may send the form.
(() => {
  if (argument.href !== undefined)
    return {element: all('a[href]').find((a) => a.getAttribute('href') === argument.href)};
  const form = all('form').find((f) => f.getAttribute('action') === argument.action);
  if (!form) return {};
  const wanted = Object.entries(argument.values);
  const inputs = (name) => [...form.elements].filter((e) => e.name === name);
  for (const [name, value] of wanted) for (const e of inputs(name)) {
    if (e.type === 'radio' && e.value === value && !e.checked) return {element: e.closest('label') || e};
    if (e.type === 'checkbox' && e.checked !== (e.value === value)) return {element: e.closest('label') || e};
  }
  for (const [name, value] of wanted) for (const e of inputs(name))
    if (e.type !== 'radio' && e.type !== 'checkbox' && e.value.trim() !== value) return {element: e, text: value};
  return {element: form.querySelector('button')};
})()
