// A line chart as SVG, with the last values of its lines in a legend. Lines differ in colour and in dashes.
import { h, svg, visible } from "./dom.js";

const WIDTH = 420, HEIGHT = 180, LEFT = 54, BOTTOM = 34, TOP = 8, RIGHT = 10;
const MOST_POINTS = 400; // of a line; more are averaged, of a line of largest values the largest is kept
const LARGEST = /largest|peak/;
const FEW_POINTS = 12; // of a line whose points are marked
const STYLES = 6;

// series: [{name, points, place?, curve?}], place: number of its style, curve: its name if `name` is that of a run. axis: {name, format} of x.
export function chart(title, series, format, axis = { name: "policy version", format: (value) => String(Math.round(value)) }) {
  const lines = series.map((each, place) => ({ ...each, points: thin(each.points, LARGEST.test(each.curve ?? each.name)), last: each.points.at(-1)[1], style: lineStyle(each.place ?? place) }));
  const all = lines.flatMap((each) => each.points);
  const [x0, x1] = range(all.map(([x]) => x)), [y0, y1] = range(all.map(([, y]) => y));
  const x = (value) => LEFT + ((value - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const heights = [y0, (y0 + y1) / 2, y1], alike = new Set(heights.map((value) => format(value))).size < heights.length;
  const levels = heights.map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, alike ? value.toPrecision(6) : format(value)),
  ]);
  const ends = [[x0, "start"], [x1, "end"]].map(([value, anchor]) => svg("text", { x: x(value), y: HEIGHT - BOTTOM + 16, "text-anchor": anchor }, axis.format(value)));
  const name = svg("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, axis.name);
  const paths = lines.map((each) => svg("polyline", { class: `line ${each.style}`, points: each.points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
  const dots = lines.filter((each) => each.points.length <= FEW_POINTS).flatMap((each) => each.points.map(([a, b]) => svg("circle", { class: `dot ${each.style}`, cx: x(a), cy: y(b), r: 2.6 })));
  return h("figure", { class: "chart" }, h("figcaption", {}, visible(title)),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${visible(title)} over ${axis.name} ${axis.format(x0)} to ${axis.format(x1)}` }, levels, ends, name, paths, dots),
    h("ul", { class: "legend" }, lines.map((each, place) => h("li", { class: each.style }, lineKey(each.place ?? place), visible(each.name), " ", h("b", {}, format(each.last))))));
}

// The classes of line number `place`; the seventh has the first colour with the second dashes.
export function lineStyle(place) {
  return `line-${place % STYLES} dash-${(place + Math.floor(place / STYLES)) % STYLES}`;
}

// A sample of a line, for legends.
export function lineKey(place) {
  return svg("svg", { class: `key ${lineStyle(place)}`, viewBox: "0 0 30 8", "aria-hidden": "true" }, svg("line", { class: "line", x1: 0, x2: 30, y1: 4, y2: 4 }));
}

function range(values) {
  const low = Math.min(...values), high = Math.max(...values);
  if (high > low) return [low, high];
  return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
}

function thin(points, largest) {
  const size = Math.ceil(points.length / MOST_POINTS);
  if (size <= 1) return points;
  return Array.from({ length: Math.ceil(points.length / size) }, (_, place) => {
    const part = points.slice(place * size, (place + 1) * size);
    const values = part.map(([, value]) => value);
    return [part.at(-1)[0], largest ? Math.max(...values) : values.reduce((sum, value) => sum + value, 0) / part.length];
  });
}
