// A line chart over policy versions, as SVG with a table of its last values for readers of text.
import { h, svg, visible } from "./dom.js";

const WIDTH = 420, HEIGHT = 170, LEFT = 54, BOTTOM = 22, TOP = 8, RIGHT = 10;
const MOST_POINTS = 400; // of a line; more are averaged

export function chart(title, series, format) {
  const lines = series.map((each) => ({ ...each, points: thin(each.points) }));
  const all = lines.flatMap((each) => each.points);
  const [x0, x1] = range(all.map(([x]) => x)), [y0, y1] = range(all.map(([, y]) => y));
  const x = (value) => LEFT + ((value - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const axis = [y0, (y0 + y1) / 2, y1].map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)),
  ]);
  const ends = [[x0, "start"], [x1, "end"]].map(([value, anchor]) => svg("text", { x: x(value), y: HEIGHT - 5, "text-anchor": anchor }, String(Math.round(value))));
  const paths = lines.map((each, place) => svg("polyline", { class: `line line-${place % 6}`, points: each.points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
  const single = lines.flatMap((each, place) => each.points.length === 1 ? [svg("circle", { class: `dot line-${place % 6}`, cx: x(each.points[0][0]), cy: y(each.points[0][1]), r: 3 })] : []);
  return h("figure", { class: "chart" }, h("figcaption", {}, title),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title} over policy versions ${x0} to ${x1}` }, axis, ends, paths, single),
    h("ul", { class: "legend" }, series.map((each, place) => h("li", { class: `line-${place % 6}` }, h("span", { class: "key" }), visible(each.name), " ", h("b", {}, format(each.points.at(-1)[1]))))));
}

function range(values) {
  const low = Math.min(...values), high = Math.max(...values);
  return high > low ? [low, high] : [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
}

function thin(points) {
  const size = Math.ceil(points.length / MOST_POINTS);
  if (size <= 1) return points;
  return Array.from({ length: Math.ceil(points.length / size) }, (_, place) => {
    const part = points.slice(place * size, (place + 1) * size);
    return [part.at(-1)[0], part.reduce((sum, [, value]) => sum + value, 0) / part.length];
  });
}
