// The weights and predictions that docs/tutorial.md draws. tests/test_tutorial.py compares them with `regard.attention`.
"use strict";

const regardKernels = (() => {
  // The choices of the figure: label, attention spec, kernel, thresholding rule. Scores are -|q - k|^2 / (2 h^2), which
  // regard computes with the Euclidean similarity and scale = 1 / h^2.
  const CHOICES = [
    { label: "softmax", spec: "gaussian*fixed*euclidean", kernel: "gaussian", rule: "fixed" },
    { label: "fixed radius", spec: "epanechnikov*fixed(bias=1.0)*euclidean", power: 1, rule: "fixed", bias: 1 },
    { label: "sparsemax", spec: "epanechnikov*adaptive*euclidean", power: 1, rule: "adaptive" },
    { label: "1.5-entmax (biweight)", spec: "biweight*adaptive*euclidean", power: 2, rule: "adaptive" },
    { label: "4/3-entmax (triweight)", spec: "triweight*adaptive*euclidean", power: 3, rule: "adaptive" },
    { label: "ReLUmax", spec: "epanechnikov*anchored(margin=1.0)*euclidean", power: 1, rule: "anchored", margin: 1 },
    { label: "min-p", spec: "gaussian*anchored(margin=1.0)*euclidean", kernel: "gaussian", rule: "anchored", margin: 1 },
    { label: "top-4 softmax", spec: "gaussian*nearest(k=4)*euclidean", kernel: "gaussian", rule: "nearest", k: 4 },
    { label: "top-4 mean", spec: "uniform*nearest(k=4)*euclidean", kernel: "uniform", rule: "nearest", k: 4 },
  ];

  const sum = (x) => x.reduce((total, each) => total + each, 0);

  function scores(query, keys, bandwidth) {
    return keys.map((key) => -((query - key) ** 2) / (2 * bandwidth ** 2));
  }

  // The threshold at which the weights [z / r - theta / r]^r sum to one, by bisection.
  function adaptiveThreshold(z, power) {
    let low = Math.max(...z) - power;
    let high = Math.max(...z);
    for (let step = 0; step < 100; step++) {
      const middle = (low + high) / 2;
      if (sum(z.map((each) => (Math.max(each - middle, 0) / power) ** power)) > 1) low = middle;
      else high = middle;
    }
    return (low + high) / 2;
  }

  // The threshold of a rule; the keys of `nearest` are chosen by rank, so that ties keep exactly k of them.
  function threshold(z, choice) {
    if (choice.rule === "adaptive") return adaptiveThreshold(z, choice.power);
    if (choice.rule === "anchored") return Math.max(...z) - choice.margin;
    return choice.bias === undefined ? -Infinity : -choice.bias;
  }

  function kept(z, choice, theta) {
    if (choice.rule !== "nearest") return z.map((each) => each > theta);
    const order = z.map((_, i) => i).sort((i, j) => z[j] - z[i] || i - j);
    const nearest = new Set(order.slice(0, choice.k));
    return z.map((_, i) => nearest.has(i));
  }

  // The normalised weights of one query; equal weights where no key is near enough.
  function weights(z, choice) {
    const theta = threshold(z, choice);
    const top = Math.max(...z);
    const inside = kept(z, choice, theta);
    const w = z.map((each, i) => {
      if (!inside[i]) return 0;
      if (choice.kernel === "gaussian") return Math.exp(each - top);
      return choice.kernel === "uniform" ? 1 : (each - theta) ** choice.power;
    });
    const total = sum(w);
    return w.map((each) => (total > 0 ? each / total : 1 / z.length));
  }

  // The weighted mean of the values.
  function average(p, values) {
    return sum(p.map((each, i) => each * values[i]));
  }

  // The weights of the values at the end of a line that is fitted with weights p: p (1 + (k - kbar) t).
  function lineWeights(p, keys, query, ridge) {
    const mean = average(p, keys);
    const t = (query - mean) / (sum(p.map((each, i) => each * (keys[i] - mean) ** 2)) + ridge);
    return p.map((each, i) => each * (1 + (keys[i] - mean) * t));
  }

  function effectiveSampleSize(p) {
    const squares = sum(p.map((each) => each ** 2));
    return sum(p.map(Math.abs)) ** 2 / squares;
  }

  return { CHOICES, scores, weights, average, lineWeights, effectiveSampleSize };
})();

if (typeof module !== "undefined") module.exports = regardKernels;
