// The figure of docs/tutorial.md: weights of every choice for a query and a bandwidth that the reader moves.
"use strict";

(() => {
  const home = document.getElementById("kernel-figure");
  if (!home) return;
  const { CHOICES, scores, weights, average, lineWeights, effectiveSampleSize } = regardKernels;
  const KEYS = [-2.8, -2.5, -2.2, -1.6, -1.3, -0.9, -0.4, -0.1, 0.5, 0.7, 1.4, 1.9, 2.1];
  const VALUES = [-1.2, -1.05, -1.0, -0.35, -0.5, 0.05, 0.2, 0.65, 0.75, 1.15, 1.0, 0.6, 0.75];
  const [LEFT, RIGHT] = [-3, 3];
  const GRID = Array.from({ length: 121 }, (_, i) => LEFT + ((RIGHT - LEFT) * i) / 120);
  const state = { query: 1, bandwidth: 0.6, ridge: 0.01, chosen: 3 };

  const make = (name, attributes, parent) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return parent.appendChild(node);
  };
  const element = (name, parent, text = "") => {
    const node = parent.appendChild(document.createElement(name));
    node.textContent = text;
    return node;
  };
  const across = (x, width) => ((x - LEFT) / (RIGHT - LEFT)) * width;

  function slider(name, label, low, high, step) {
    const row = element("label", home, `${label} `);
    row.style.cssText = "display: inline-block; margin-right: 1.5em";
    const input = row.appendChild(document.createElement("input"));
    Object.assign(input, { type: "range", min: low, max: high, step, value: state[name] });
    input.setAttribute("aria-label", label);
    const shown = element("output", row);
    input.addEventListener("input", () => {
      state[name] = Number(input.value);
      draw();
    });
    return () => {
      input.value = state[name];
      shown.textContent = ` ${state[name].toFixed(2)}`;
    };
  }

  const refresh = [
    slider("query", "query", LEFT, RIGHT, 0.01),
    slider("bandwidth", "bandwidth h", 0.1, 3, 0.01),
    slider("ridge", "ridge", 0.001, 1, 0.001),
  ];
  const [WIDTH, HEIGHT] = [640, 220];
  const main = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", style: "width: 100%; touch-action: none" }, home);
  const caption = element("p", home);
  const panels = element("div", home);
  panels.style.cssText = "display: grid; grid-template-columns: repeat(3, 1fr); gap: 0.5em";

  const move = (event) => {
    const box = main.getBoundingClientRect();
    const x = LEFT + ((event.clientX - box.left) / box.width) * (RIGHT - LEFT);
    state.query = Math.round(Math.min(Math.max(x, LEFT), RIGHT) * 100) / 100;
    draw();
  };
  main.addEventListener("pointerdown", (event) => {
    main.setPointerCapture(event.pointerId);
    move(event);
  });
  main.addEventListener("pointermove", (event) => event.buttons && move(event));

  const frames = CHOICES.map((choice, i) => {
    const frame = element("button", panels);
    frame.style.cssText = "font: inherit; color: inherit; text-align: left; padding: 0.3em; cursor: pointer";
    element("b", frame, choice.label).style.display = "block";
    const drawing = make("svg", { viewBox: "0 0 200 90", style: "width: 100%" }, frame);
    const note = element("small", frame);
    frame.addEventListener("click", () => {
      state.chosen = i;
      draw();
    });
    return { frame, drawing, note };
  });

  function path(points, parent, attributes) {
    const d = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    make("path", { d, fill: "none", ...attributes }, parent);
  }

  function drawFit() {
    main.replaceChildren();
    const choice = CHOICES[state.chosen];
    const up = (value) => HEIGHT / 2 - (value / 2) * (HEIGHT / 2);
    const p = weights(scores(state.query, KEYS, state.bandwidth), choice);
    const most = Math.max(...p, 1e-9);
    const at = (query, fit) => {
      const row = weights(scores(query, KEYS, state.bandwidth), choice);
      return fit === "line" ? average(lineWeights(row, KEYS, query, state.ridge), VALUES) : average(row, VALUES);
    };
    for (const [fit, colour] of [["average", "#3f6ad8"], ["line", "#d8573f"]]) {
      const points = GRID.map((x) => [across(x, WIDTH), Math.min(Math.max(up(at(x, fit)), 0), HEIGHT)]);
      path(points, main, { stroke: colour, "stroke-width": 2 });
      make("circle", { cx: across(state.query, WIDTH), cy: up(at(state.query, fit)), r: 5, fill: colour }, main);
    }
    const x = across(state.query, WIDTH);
    make("line", { x1: x, x2: x, y1: 0, y2: HEIGHT, stroke: "currentColor", "stroke-dasharray": "4 4" }, main);
    KEYS.forEach((key, i) => {
      const dot = { cx: across(key, WIDTH), cy: up(VALUES[i]), r: 4, stroke: "currentColor" };
      make("circle", { ...dot, fill: "currentColor", "fill-opacity": (p[i] / most).toFixed(3) }, main);
    });
    caption.textContent =
      `${choice.spec}, scale = 1 / h² = ${(1 / state.bandwidth ** 2).toFixed(3)}: ` +
      `average ${at(state.query, "average").toFixed(4)} (blue), line ${at(state.query, "line").toFixed(4)} (red). ` +
      "Dots are the pairs, filled by weight.";
  }

  function drawPanel({ frame, drawing, note }, choice, i) {
    drawing.replaceChildren();
    frame.style.border = i === state.chosen ? "2px solid currentColor" : "1px solid #8888";
    const p = weights(scores(state.query, KEYS, state.bandwidth), choice);
    const signed = lineWeights(p, KEYS, state.query, state.ridge);
    const up = (weight) => 65 - 55 * Math.min(Math.max(weight, -0.4), 1);
    make("line", { x1: 0, x2: 200, y1: up(0), y2: up(0), stroke: "#8888" }, drawing);
    KEYS.forEach((key, j) => {
      const x = across(key, 200);
      make("line", { x1: x, x2: x, y1: up(0), y2: up(p[j]), stroke: "#3f6ad8", "stroke-width": 4 }, drawing);
      make("circle", { cx: x, cy: up(signed[j]), r: 2.5, fill: "#d8573f" }, drawing);
    });
    const nonzero = p.filter((weight) => weight > 0).length;
    note.textContent = `${nonzero} of ${KEYS.length} keys, effective ${effectiveSampleSize(p).toFixed(1)}`;
  }

  function draw() {
    refresh.forEach((each) => each());
    drawFit();
    CHOICES.forEach((choice, i) => drawPanel(frames[i], choice, i));
  }
  draw();
})();
