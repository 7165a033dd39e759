// Finds the coordinate nearest to the target point at which the element is topmost, preferring multiples of
// step; `within` is the maximum distance in pixels. Scrolls to an element outside the viewport. The end of a
// drag is `by` pixels from its start, within `slack` pixels on each axis.
({range, step, argument}) => {
  const $ = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const query = () => $('#query').textContent;
  const shown = (selector) => all(selector).some((e) => e.offsetHeight > 0);
  const middle = (e) => { const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; };
  const pixel = ([x, y]) => [Math.min(x * innerWidth / range, innerWidth - 1),
                             Math.min(y * innerHeight / range, innerHeight - 1)];
  const nearest = (box, [aimX, aimY], reach, accept) => {
    const cells = (low, high, size, spacing) => {
      const first = Math.max(0, Math.ceil(low * range / size / spacing));
      const last = Math.min(range / spacing, Math.floor(high * range / size / spacing));
      return Array.from({length: Math.max(0, last - first + 1)}, (_, i) => (first + i) * spacing);
    };
    for (const spacing of [step, 1]) {
      let best = null, least = Infinity;
      for (const x of cells(box.left, box.right, innerWidth, spacing)) {
        for (const y of cells(box.top, box.bottom, innerHeight, spacing)) {
          const [px, py] = pixel([x, y]);
          const distance = Math.hypot(px - aimX, py - aimY);
          if (distance < least && distance <= reach && accept(px, py)) { best = [x, y]; least = distance; }
        }
      }
      if (best) return best;
    }
    return null;
  };
  let target;
  try { target = TARGET; } catch (error) { return {problem: `the page is not as expected: ${error}`}; }
  if (target.key) return {kind: 'key', text: target.key};
  const element = target.element;
  if (!element) return {problem: 'the element to act on is not on the page'};
  const aimed = target.at || middle(element);
  if (aimed[1] < 0) return {kind: 'scroll', direction: 'up'};
  if (aimed[1] >= innerHeight) return {kind: 'scroll', direction: 'down'};
  const coordinate = nearest(element.getBoundingClientRect(), aimed, target.within || Infinity, (x, y) => {
    const hit = document.elementFromPoint(x, y);
    return hit && element.contains(hit);
  });
  if (!coordinate) return {problem: 'no visible point of the element can be clicked'};
  const found = {kind: target.kind || (target.text === undefined ? 'left_click' : 'type'), coordinate,
                 text: target.text, direction: target.direction, note: target.note};
  if (!target.by) return found;
  const [x, y] = pixel(coordinate), slack = target.slack || 1, endX = x + target.by[0], endY = y + target.by[1];
  const around = {left: endX - slack, right: endX + slack, top: endY - slack, bottom: endY + slack};
  const end = nearest(around, [endX, endY], Infinity, () => true);
  return end ? {...found, kind: 'drag', end} : {problem: 'the drag would end outside the viewport'};
}
