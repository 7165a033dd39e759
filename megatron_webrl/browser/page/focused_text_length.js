// Length of the focused text field's content in characters; null if no text field has the focus.
() => {
  // A form named "activeElement" shadows document.activeElement; the getter of the prototype cannot be shadowed.
  let element = Object.getOwnPropertyDescriptor(Document.prototype, "activeElement").get.call(document);
  while (element && element.shadowRoot && element.shadowRoot.activeElement) element = element.shadowRoot.activeElement;
  if (!element) return null;
  if (element.tagName === "IFRAME") return 1;
  if (element.isContentEditable) return element.textContent.length;
  const plain = ["text", "search", "url", "tel", "email", "password", "number", "date", "time", "month", "week",
                 "datetime-local"];
  const takesText = element.tagName === "TEXTAREA" || (element.tagName === "INPUT" && plain.includes(element.type));
  return takesText && !element.readOnly && !element.disabled ? element.value.length : null;
}
