/* Side view of the step shown: "Why this tree".  Draws what visual/why.py draws in Python, function by function; tests compare
 * the two.  Only for runs with a cost model in their metadata.
 */
(function () {
  "use strict";

  var tools = window.Eagle2Player.tools, el = tools.el, plural = tools.plural, digits = tools.digits, PHASES = tools.PHASES;

  function onCurve(points, at) {
    if (at <= points[0][0] || points.length === 1) return points[0][1];
    var right = points.findIndex(function (point) { return point[0] >= at; });
    if (right < 0) right = points.length - 1; // beyond the last point: the last segment's line
    var a = points[right - 1], b = points[right];
    return a[1] + (b[1] - a[1]) / (b[0] - a[0]) * (at - a[0]);
  }

  /* Rows of every pass of the draft head, step by step; none where nothing was drafted. */
  function fedRows(steps, prompt, limit) {
    var pending = prompt;
    return steps.map(function (step) {
      var rows = [];
      if (step.passes.length) { // else no draft, or copies alone
        rows = [Math.min(pending, limit)].concat(step.passes.slice(1).map(function (nodes) { return nodes.length; }));
        pending = 0;
      }
      pending += step.accepted.length + 1;
      return rows;
    });
  }

  function stepSeconds(costs, rows, nodes) {
    if (!rows.length) return onCurve(costs.verify, 1 + nodes);
    var draft = rows.reduce(function (sum, n) { return sum + onCurve(costs.draft, n); }, 0);
    return draft + onCurve(costs.verify, 1 + nodes) + costs.overhead;
  }

  /* `pass`: as after this draft pass, null: with what was kept. */
  function whyInfo(step, rows, costs, pass) {
    var marks = tools.valuesInfo(step).marks;
    if (pass !== null) {
      marks = marks.filter(function (mark) { return mark.born <= pass; });
      rows = rows.slice(0, pass + 1);
    }
    var tokens = [1], plain = onCurve(costs.verify, 1);
    marks.forEach(function (mark) { tokens.push(tokens[tokens.length - 1] + mark.value); });
    var steps = tokens.map(function (_, n) { return stepSeconds(costs, rows, n) / plain; });
    var speedups = tokens.map(function (sum, n) { return sum / steps[n]; });
    var kept = pass === null ? marks.filter(function (mark) { return mark.kept; }) : [];
    var keptTokens = kept.reduce(function (sum, mark) { return sum + mark.value; }, 1);
    return {
      nodes: marks.map(function (mark) { return mark.node; }), tokens: tokens, steps: steps, speedups: speedups,
      best: speedups.indexOf(Math.max.apply(null, speedups)), kept: kept.length, keptTokens: keptTokens,
      speedup: keptTokens / steps[kept.length], came: step.accepted.length + 1, passes: rows.length,
    };
  }

  function whyWords(why, phase, words) {
    function expected(tokens, n) {
      return tokens.toFixed(2) + " tokens for the time of " + why.steps[n].toFixed(2) + " plain steps, " + (tokens / why.steps[n]).toFixed(2) + "×";
    }
    var drafted = why.nodes.length, best = why.speedups[why.best];
    if (!drafted) return words.nothing;
    if (phase === "draft") {
      return "After draft pass " + why.passes + ": " + plural(drafted, "node") + ". Keeping " + why.best + " would be best so far: expected " +
        expected(why.tokens[why.best], why.best) + ".";
    }
    var said = "Keeping " + why.kept + " of " + plural(drafted, "node") + ": expected " + expected(why.keptTokens, why.kept) + ".";
    var lost = Math.round(100 * (1 - why.speedup / best));
    if (lost) {
      said += (why.best ? " Keeping the " + why.best + " of highest value" : " Keeping none") + " would be best, " + best.toFixed(2) + "×: this cut loses " + lost + "\u00a0%.";
    } else said += " No other cut is faster.";
    if (why.speedup < 1) said += " Slower than plain steps" + (lost ? "." : ", but the draft is paid for by then.");
    if (phase === "accept") said += " What came of it: " + plural(why.came, "token") + ".";
    return said;
  }

  function most(values, start) { return values.reduce(function (high, value) { return Math.max(high, value); }, start); }

  function spanOf(every) {
    var drafted = 0, cuts = 0, span = { tokens: 1.5, steps: 1.5, low: 1, high: 1.25 };
    every.forEach(function (of) {
      var last = of[of.length - 1];
      drafted = Math.max(drafted, last.nodes.length);
      cuts = Math.max(cuts, last.kept, last.best);
    });
    var nodes = span.nodes = Math.max(Math.min(drafted, Math.max(8, Math.ceil(1.5 * cuts))), 1);
    every.forEach(function (of) {
      of.forEach(function (why) {
        var speedups = why.speedups.slice(0, nodes + 1).concat(why.speedup);
        span.tokens = Math.max(most(why.tokens.slice(0, nodes + 1), span.tokens), why.came);
        span.steps = Math.max(span.steps, why.steps[Math.min(nodes, why.steps.length - 1)]);
        span.high = most(speedups, span.high);
        span.low = -most(speedups.map(function (value) { return -value; }), -span.low);
      });
    });
    span.low = every.length ? Math.floor(2 * span.low) / 2 : 0.5;
    return span;
  }

  function axisTicks(low, high, count) {
    var step = null, ticks = [];
    for (var power = -1; step === null; power++) {
      [1, 2, 5].forEach(function (n) { if (step === null && high - low <= Math.pow(10, power) * n * count) step = Math.pow(10, power) * n; });
    }
    for (var i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) ticks.push(i * step);
    return ticks;
  }

  function number(value) { return String(Number(value.toPrecision(6))); }

  function whyHover(why, costs, n) {
    var ms = digits(1000 * why.steps[n] * onCurve(costs.verify, 1));
    return "<b>n = " + n + "</b>" + (n ? ": with the " + tools.ordinal(n) + " value" : "") + "<br>expected tokens " + why.tokens[n].toFixed(2) +
      "<br>time " + why.steps[n].toFixed(2) + " plain steps (" + ms + " ms)<br>expected speed-up " + why.speedups[n].toFixed(2) + "×";
  }

  function whyFigure(why, costs, phase, scheme, ends, width, setup) {
    var s = setup.why.sizes, words = setup.why.words, late = PHASES.indexOf(phase) >= 1, data = {}, right = width - s.right;
    var plain = onCurve(costs.verify, 1), lows = [1, 1, ends.low], highs = [ends.tokens, ends.steps, ends.high], down = 0;
    var bottoms = s.panels.map(function (high) { return (down += s.title + high); });
    setup.why.traces[scheme].forEach(function (trace) { data[trace.name] = { x: [], y: [] }; });
    function x(n) { return s.left + n / ends.nodes * (right - s.left); }
    function y(panel, value) {
      return bottoms[panel] - s.inset - (value - lows[panel]) / (highs[panel] - lows[panel]) * (s.panels[panel] - s.inset - s.head);
    }
    function add(layer, px, py, values) {
      var all = Object.assign({ x: px, y: py }, values);
      Object.keys(all).forEach(function (key) { (data[layer][key] = data[layer][key] || []).push(all[key]); });
    }
    function line(layer, x0, y0, x1, y1) {
      add(layer, x0, y0);
      add(layer, x1, y1);
      add(layer, null, null);
    }
    words.titles.forEach(function (title, panel) {
      add("words", 0, bottoms[panel] - s.panels[panel] - s.title / 2, { text: title.replace("{ms}", digits(1000 * plain)), textposition: "middle right" });
      axisTicks(lows[panel], highs[panel], 4).forEach(function (tick) {
        line("grid", s.left, y(panel, tick), right, y(panel, tick));
        add("ticks", s.left - 7, y(panel, tick), { text: number(tick), textposition: "middle left" });
      });
    });
    if (ends.low < 1) line("plain", s.left, y(2, 1), right, y(2, 1));
    axisTicks(0, ends.nodes, 8).forEach(function (tick) {
      if (tick === Math.floor(tick)) add("ticks", x(tick), bottoms[2] + 9, { text: number(tick), textposition: "middle center" });
    });
    add("ticks", s.left, bottoms[2] + 25, { text: words.x_title, textposition: "middle right" });

    var drafted = Math.min(why.nodes.length, ends.nodes);
    [why.tokens, why.steps, why.speedups].forEach(function (column, panel) {
      for (var n = 0; n <= drafted; n++) {
        add("curves", x(n), y(panel, column[n]), { hovertext: whyHover(why, costs, n), customdata: n ? why.nodes[n - 1] : null });
      }
      add("curves", null, null, { hovertext: "", customdata: null });
    });
    for (var n = 0; n <= ends.nodes; n++) {
      var relative = onCurve(costs.verify, n + 1) / plain;
      if (relative <= ends.steps) add("pass", x(n), y(1, relative));
    }
    costs.verify.forEach(function (point) {
      if (point[0] - 1 > ends.nodes || point[1] / plain > ends.steps) return;
      add("measured", x(point[0] - 1), y(1, point[1] / plain), { hovertext: "measured: " + plural(point[0], "row") + " in " + digits(1000 * point[1]) + " ms" });
    });
    if (drafted) {
      var last = data.pass.x.length - 1;
      add("words", x(drafted), y(1, why.steps[drafted]) - 10, { text: words.lines[0], textposition: "middle left" });
      // Under the dashed line, which rises: as low as it is at the label's beginning.
      var begins = Math.max(0, Math.trunc(last - s.letter * words.lines[1].length / (x(1) - x(0))));
      add("words", data.pass.x[last], y(1, onCurve(costs.verify, 1 + begins) / plain) + 11, { text: words.lines[1], textposition: "middle left" });
      add("best", x(why.best), y(2, why.speedups[why.best]));
    }
    if (late && why.kept <= ends.nodes) {
      var at = x(why.kept), numbers = [why.keptTokens, why.steps[why.kept], why.speedup];
      line("cut-line", at, bottoms[0] - s.panels[0], at, bottoms[2]);
      numbers.forEach(function (value, panel) {
        var rises = panel === 1 || why.kept <= why.best, left = (panel > 0 && rises && why.kept > 0) || at + 6 + s.letter * 5 > width;
        add("cut", at, y(panel, value));
        add("words", left ? at - 7 : at + 7, y(panel, value) + (panel ? -10 : 11), {
          text: "<b>" + value.toFixed(2) + (panel === 2 ? "×" : "") + "</b>", textposition: left ? "middle left" : "middle right",
        });
      });
      if (phase === "accept") add("came", at, y(0, why.came), { hovertext: plural(why.came, "token") + " came of this step" });
    }
    return {
      traces: setup.why.traces[scheme].map(function (base) { return Object.assign({}, base, data[base.name]); }),
      layout: Object.assign({}, setup.layouts[scheme], {
        width: width, height: s.height, xaxis: Object.assign({}, setup.layouts[scheme].xaxis, { range: [0, width] }),
        yaxis: Object.assign({}, setup.layouts[scheme].yaxis, { range: [s.height, 0] }),
      }),
      /* Pixels of a node in the lowest panel, null where it has none. */
      pixel: function (node) {
        var n = why.nodes.indexOf(node) + 1;
        return n && n <= drafted ? [x(n), y(2, why.speedups[n])] : null;
      },
    };
  }

  window.Eagle2Player.part("side", function (context) {
    var setup = context.setup, words = setup.why.words, costs = null, rows = [], span = null, infos = new Map(), runs = 0, timer = 0;
    var drawn = null, at = "", shown = null, pointed = null, title = "Why this tree";
    var div = el("div", { "data-testid": "why", role: "img", "aria-label": title });
    var ring = el("span", { class: "e2-ring", "data-testid": "why-ring", hidden: true, "aria-hidden": "true" });
    var box = el("div", { class: "e2-viewbox", "data-testid": "why-box" }, div, ring);
    var said = el("span", { class: "e2-why-said", "data-testid": "why-said" });
    function key(kind, text) { return el("span", { class: "e2-nobreak" }, el("span", { class: "e2-key " + kind, "aria-hidden": "true" }), text + " "); }
    var root = el("figure", { class: "e2-view", hidden: true }, el("figcaption", {}, el("b", { text: title }), said,
      el("span", {}, key("e2-key-cutmark", "this cut,"), key("e2-key-best", "best cut,"), key("e2-key-came", "what came of it,"), key("", "measured."))), box);
    box.style.minHeight = setup.why.sizes.height + "px";
    var saves = context.saveable("why", title, div);

    function point(node) {
      if (node === pointed) return;
      pointed = node;
      context.link(node === null || !context.step() ? null : { step: context.step().number, node: node });
    }

    /* `pass`: null with what was kept. */
    function infoOf(step, pass) {
      var name = step.number + ":" + pass;
      if (!infos.has(name)) infos.set(name, whyInfo(step, rows[step.number], costs, pass));
      return infos.get(name);
    }

    function show(step, phase) {
      clearTimeout(timer);
      ring.hidden = true;
      if (!costs || !window.Plotly) return;
      var pass = phase === "draft" && rows[step.number].length ? context.state.beat : null;
      said.textContent = whyWords(infoOf(step, pass), phase, words);
      timer = setTimeout(function () { draw(step, phase, pass); }, 0); // after the tree, as the other views
    }
    function draw(step, phase, pass) {
      var width = box.clientWidth, scheme = context.scheme();
      if (context.step() !== step || width < 100) return;
      var now = [runs, step.number, scheme, width, pass === null ? (phase === "accept" ? phase : "rerank") : "draft" + pass].join();
      if (now !== at) {
        var first = !div.classList.contains("js-plotly-plot");
        at = now;
        drawn = whyFigure(infoOf(step, pass), costs, phase, scheme, span, width, setup);
        div.setAttribute("aria-label", title + ". " + said.textContent);
        context.plot(div, drawn.traces, drawn.layout);
        if (first && div.on) {
          div.on("plotly_hover", function (event) { var node = event.points[0].customdata; point(node === undefined ? null : node); });
          div.on("plotly_unhover", function () { point(null); });
        }
      }
      shown = step;
      div.dataset.drawn = step.number + ":" + phase;
      mark(context.state.link || context.state.pin);
    }
    function mark(link) {
      var step = context.step(), node = link && step && link.step === step.number ? link.node : null;
      var pixel = costs && node !== null && shown === step && drawn ? drawn.pixel(node) : null;
      ring.hidden = !pixel;
      if (!pixel) return;
      ring.dataset.node = node;
      ring.style.left = pixel[0] + "px";
      ring.style.top = pixel[1] + "px";
    }

    return {
      root: root,
      run: function (run) {
        var steps = context.state.steps;
        runs++;
        infos.clear();
        pointed = shown = null;
        costs = run.costs && steps.length ? run.costs : null;
        root.hidden = !costs;
        saves.forEach(function (button) { button.hidden = !costs; });
        if (!costs) return;
        rows = fedRows(steps, run.first_position, costs.catch_up);
        span = spanOf(steps.map(function (step) {
          return rows[step.number].map(function (_, pass) { return infoOf(step, pass); }).concat(infoOf(step, null));
        }));
      },
      step: show,
      link: mark,
    };
  });
})();
