/* The race under the lanes: tokens against own time, what each step cost and saved, where the time went, whether the tokens
 * are the same, and a replay of both lanes on their recorded clocks.
 *
 * All words and table cells come from visual/race.py (run.race).  Plotly draws the lines once per run; what moves with the
 * player or the replay lies over them as a small SVG, since a Plotly update would take a fifth of a step's time.  The traces
 * "clock" and "now-" hold the same positions for a saved picture; the style sheet hides them on the page.
 */
(function () {
  "use strict";

  var tools = window.Eagle2Player.tools, el = tools.el, plural = tools.plural;
  var SVG = "http://www.w3.org/2000/svg";
  var MARKERS = 12; // px, as the template's
  var CALM = 250; // ms between two pictures of a replay where a person asked for less motion

  function shape(tag, name) {
    var node = document.createElementNS(SVG, tag);
    node.setAttribute("class", name);
    return node;
  }

  function make(context) {
    var setup = context.setup.race;
    var run = null, box = null; // the run on show, and its chart's size and scales once drawn
    var now = null, filled = null, shown = "", linked = null, replay = null, hovered = false, drawnFor = "";
    var layer = {};
    setup.templates.light.forEach(function (base, i) { layer[base.name] = i; });

    /* ---- what is on the page ---- */

    var plot = el("div", { class: "e2-race-plot", role: "img", "data-testid": "race-chart" });
    var over = shape("svg", "e2-race-over");
    over.setAttribute("aria-hidden", "true");
    var marks = {
      segment: shape("path", "e2-race-segment"), clock: shape("path", "e2-race-clock"),
      autoregressive: shape("rect", "e2-race-other"), eagle2: shape("circle", "e2-race-own"),
    };
    marks.eagle2.setAttribute("r", MARKERS / 2);
    ["width", "height"].forEach(function (name) { marks.autoregressive.setAttribute(name, MARKERS); });
    Object.keys(marks).forEach(function (name) { over.append(marks[name]); });
    var caption = el("figcaption", { class: "e2-race-caption" });
    var chart = el("div", { class: "e2-race-chart" }, plot, over);

    var button = el("button", { type: "button", class: "e2-button e2-wide", "data-testid": "replay", onclick: function () { if (replay) leave(); else start(); } });
    var speed = el("select", { "data-testid": "replay-speed", "aria-label": "Speed of the replay", onchange: function () { if (replay) replay.speed = +speed.value; } });
    setup.speeds.forEach(function (pair) { speed.append(el("option", { value: pair[0], text: pair[1], selected: pair[0] === 1 })); });
    var status = el("p", { class: "e2-race-status", role: "status", "data-testid": "replay-status" });

    var bar = el("div", { class: "e2-split-bar", role: "img" });
    var parts = el("ul", { class: "e2-split-parts" });
    var split = el("div", { class: "e2-split", "data-testid": "time-split" },
      el("p", { class: "e2-race-caption", text: "Where the EAGLE-2 lane's own time went: shares, and the median per step" }), bar, parts);
    var same = el("p", { class: "e2-difference", "data-testid": "difference" });

    var total = el("p", { class: "e2-ledger-summary", "data-testid": "ledger-summary" });
    var remarks = el("p", { class: "e2-race-caption" });
    var table = el("table", { class: "e2-table e2-ledger", "data-testid": "ledger" });
    var tableBox = el("div", { class: "e2-ledger-box", tabindex: "0", role: "region", "aria-label": "Ledger of the steps" }, table);
    var ledger = el("details", { class: "e2-details", "data-testid": "ledger-details", ontoggle: fill },
      el("summary", { text: "Ledger: what each step cost and saved" }), total, tableBox, remarks);

    var more = el("details", { class: "e2-details e2-race-more", open: true, "data-testid": "race-more", ontoggle: draw },
      el("summary", { text: "The race, each lane on its own clock" }),
      el("div", { class: "e2-race-grid" },
        el("figure", { class: "e2-race-figure" }, chart, caption),
        el("div", { class: "e2-race-words" }, split, same)), ledger);
    var root = el("div", { class: "e2-race-part", hidden: true, "data-testid": "race-part" }, more);
    // The texts that a replay lets grow are above the tree, the rest is below it.
    var replayBox = el("div", { class: "e2-race-replay" }, button, speed);

    /* ---- the chart ---- */

    function lanes() { return run.lanes; }
    function plainTimes() { return run.lanes.autoregressive ? run.lanes.autoregressive.times : []; }
    function stepEnd(i) { return run.clocks[i] + run.steps[i].ms.reduce(function (sum, part) { return sum + part; }, 0); }
    function ownEnd() { return run.steps.length ? stepEnd(run.steps.length - 1) : run.prefill; }
    function ownTokens() { return lanes().eagle2.pieces.length; }
    function at(count, seconds) { return plural(count, "token") + " at " + seconds.toFixed(2) + " s"; }

    /* The traces of visual.race.figure. */
    function traces(scheme) {
      var times = plainTimes(), data = {};
      setup.templates[scheme].forEach(function (base) { data[base.name] = { x: [], y: [] }; });
      if (times.length) {
        data.autoregressive = {
          x: [0].concat(times), y: [0].concat(times.map(function (_, i) { return i + 1; })),
          hovertext: [""].concat(times.map(function (time, i) { return at(i + 1, time); })),
        };
      }
      if (ownTokens()) {
        var own = data.eagle2 = { x: [0, run.prefill], y: [0, 1], hovertext: ["", "prefill: " + at(1, run.prefill)], customdata: [null, null] };
        run.steps.forEach(function (raw, i) {
          own.x.push(stepEnd(i));
          own.y.push(run.ends[i] + raw.e);
          own.hovertext.push("step " + (i + 1) + ": " + at(run.ends[i] + raw.e, stepEnd(i)));
          own.customdata.push(i);
        });
      }
      place(function (name) { return data[name]; });
      return setup.templates[scheme].map(function (base) {
        var trace = Object.assign({}, base, data[base.name]);
        if (base.name === "eagle2") trace.marker = Object.assign({}, base.marker, { size: trace.x.map(function (_, i) { return i < 2 ? 0 : 5; }) });
        return trace;
      });
    }

    /* Positions of the player for a saved picture. */
    function place(trace) {
      trace("clock").x = now ? [now.eagle2[0], now.eagle2[0]] : [];
      trace("clock").y = now ? [0, run.race.ranges[1]] : [];
      ["eagle2", "autoregressive"].forEach(function (name) {
        var spot = now && now[name];
        trace("now-" + name).x = spot ? [spot[0]] : [];
        trace("now-" + name).y = spot ? [spot[1]] : [];
      });
    }

    function draw() {
      if (!run || root.hidden) return;
      var width = more.open ? chart.clientWidth : 0, scheme = context.scheme();
      var key = [scheme, width].join();
      if (width && (!window.Plotly || key === drawnFor)) return;
      var layout = Object.assign({}, setup.layouts[scheme], { width: width || 700 });
      layout.xaxis = Object.assign({}, layout.xaxis, { range: [0, run.race.ranges[0]] });
      layout.xaxis.title = Object.assign({}, layout.xaxis.title, { text: run.race.axis });
      layout.yaxis = Object.assign({}, layout.yaxis, { range: [0, run.race.ranges[1]] });
      var palette = context.setup.palettes[scheme];
      layout.annotations = run.race.ends.map(function (end) {
        return Object.assign({}, end.label, { font: { size: 11, color: end.lane === "eagle2" ? palette.accepted : palette.dim } });
      });
      var made = traces(scheme);
      if (!width) { // folded away or in a hidden tab: nothing is drawn, but what "Save" reads belongs to this run
        plot.data = made;
        plot.layout = layout;
        drawnFor = "";
        return;
      }
      drawnFor = key;
      var first = !plot.classList.contains("js-plotly-plot");
      var margin = layout.margin;
      box = { width: width, height: layout.height, left: margin.l, top: margin.t, across: width - margin.l - margin.r, down: layout.height - margin.t - margin.b };
      over.setAttribute("width", width);
      over.setAttribute("height", layout.height);
      context.plot(plot, made, layout).then(function () { plot.dataset.chart = key; });
      if (first) {
        plot.on("plotly_click", function (event) {
          var step = stepOf(event);
          if (step !== null) { halt(); context.go(step, "accept"); }
        });
        plot.on("plotly_hover", function (event) {
          var step = stepOf(event);
          plot.classList.toggle("e2-over", step !== null);
          hovered = step !== null;
          context.link(hovered ? { step: step, node: 0 } : null);
        });
        plot.on("plotly_unhover", unhover);
      }
      paint();
      highlight();
    }
    function unhover() {
      plot.classList.remove("e2-over");
      if (hovered) { hovered = false; context.link(null); }
    }
    plot.addEventListener("mouseleave", unhover);
    function stepOf(event) {
      var point = event.points && event.points[0];
      return point && point.data.name === "eagle2" && typeof point.customdata === "number" ? point.customdata : null;
    }
    new ResizeObserver(function () { draw(); }).observe(chart);

    function px(seconds) { return box.left + (seconds / run.race.ranges[0]) * box.across; }
    function py(tokens) { return box.top + (1 - tokens / run.race.ranges[1]) * box.down; }

    /* Moves the markers to `now`, {eagle2: [seconds, tokens], autoregressive: the same or null}. */
    function paint() {
      if (!box || !run) return;
      over.style.visibility = now ? "visible" : "hidden";
      if (!now) return;
      var own = now.eagle2, other = now.autoregressive, x = px(own[0]);
      marks.clock.setAttribute("d", "M" + x + " " + box.top + "V" + (box.top + box.down));
      marks.eagle2.setAttribute("cx", x);
      marks.eagle2.setAttribute("cy", py(own[1]));
      marks.autoregressive.style.visibility = other ? "inherit" : "hidden";
      if (!other) return;
      marks.autoregressive.setAttribute("x", px(other[0]) - MARKERS / 2);
      marks.autoregressive.setAttribute("y", py(other[1]) - MARKERS / 2);
    }
    function highlight() {
      if (!box) return;
      var raw = run && linked !== null ? run.steps[linked] : null;
      marks.segment.setAttribute("d", raw ? "M" + px(run.clocks[linked]) + " " + py(run.ends[linked]) + "H" + px(stepEnd(linked)) + "V" + py(run.ends[linked] + raw.e) : "");
      marks.segment.dataset.step = raw ? linked : "";
    }

    /* Where the player is; the same rule as its own marking of the lanes and as visual.race.position. */
    function follow(step, phase) {
      var done = phase === "accept", times = plainTimes(), count = 0;
      var seconds = done ? stepEnd(step.number) : run.clocks[step.number];
      while (count < times.length && times[count] <= seconds + 1e-9) count++;
      var end = times[times.length - 1], other = times.length ? [Math.min(seconds, end), count] : null;
      if (done && step.number === run.steps.length - 1 && other) other = [end, times.length];
      now = { eagle2: [seconds, run.ends[step.number] + (done ? step.raw.e : 0)], autoregressive: other };
      if (plot.data) place(function (name) { return plot.data[layer[name]]; });
      paint();
    }

    /* ---- the ledger ---- */

    function fill() {
      if (!ledger.open || !run) return;
      if (filled !== run) {
        filled = run;
        var head = el("tr", {}), body = el("tbody", {});
        setup.heads.forEach(function (name) { head.append(el("th", { scope: "col", text: name })); });
        run.race.ledger.forEach(function (cells, i) {
          var row = el("tr", { "data-step": i, class: /lost$/.test(cells[7]) ? "e2-lost" : "" });
          row.append(el("th", { scope: "row" }, el("button", {
            type: "button", class: "e2-ledger-go", "aria-label": "Go to step " + cells[0], text: cells[0], onclick: function () { halt(); context.go(i, "accept"); },
          })));
          cells.slice(1).forEach(function (cell) { row.append(el("td", { text: cell })); });
          body.append(row);
        });
        table.replaceChildren(el("caption", { text: "Each step of EAGLE-2, in milliseconds" }), el("thead", {}, head), body);
        tableBox.scrollTop = 0;
      }
      current();
    }
    function current() {
      if (!ledger.open || filled !== run) return;
      var before = table.querySelector("[aria-current]"), row = table.tBodies[0].rows[context.state.step];
      if (before === row) return;
      if (before) before.removeAttribute("aria-current");
      if (!row) return;
      row.setAttribute("aria-current", "step");
      var view = tableBox.getBoundingClientRect(), place = row.getBoundingClientRect(), head = table.tHead.getBoundingClientRect().height;
      if (place.top < view.top + head) tableBox.scrollTop -= view.top + head - place.top;
      else if (place.bottom > view.bottom - 4) tableBox.scrollTop += place.bottom - view.bottom + 4;
    }

    /* ---- time split, same tokens ---- */

    function showSplit() {
      bar.replaceChildren();
      parts.replaceChildren();
      run.race.split.forEach(function (part) {
        var piece = el("span", { class: "e2-split-" + part[0] });
        piece.style.setProperty("--share", part[1]);
        bar.append(piece);
        parts.append(el("li", {}, el("span", { class: "e2-split-key e2-split-" + part[0], "aria-hidden": "true" }), el("b", { text: part[0] }), " " + part[2]));
      });
      bar.setAttribute("aria-label", run.race.split.map(function (part) { return part[0] + " " + part[2]; }).join("; "));
    }

    function clearDifference() {
      ["eagle2", "autoregressive"].forEach(function (name) {
        context.lanes[name].text.querySelectorAll(".e2-differs").forEach(function (span) {
          span.classList.remove("e2-differs");
          span.removeAttribute("title");
        });
      });
    }
    function showDifference() {
      var found = run.race.difference;
      same.textContent = found.said;
      same.dataset.state = found.state;
      if (found.at === null) return;
      ["eagle2", "autoregressive"].forEach(function (name) {
        var span = context.lanes[name].text.children[found.at];
        if (!span) return; // this lane has ended there
        span.classList.add("e2-differs");
        span.title = "First token in which the lanes differ";
      });
    }

    /* ---- the replay ---- */

    function label() {
      button.textContent = replay ? "Stop the replay" : "Replay the race";
      root.dataset.replaying = String(Boolean(replay));
    }
    function raceEnd() { var times = plainTimes(); return Math.max(ownEnd(), times.length ? times[times.length - 1] : 0); }

    function start() {
      if (!run) return;
      context.stop();
      replay = { at: 0, speed: +speed.value, before: performance.now(), drawn: -Infinity, own: -1, other: -1, frame: 0 };
      label();
      status.textContent = "Replaying both lanes on their recorded clocks.";
      replay.frame = requestAnimationFrame(tick);
    }
    function halt() {
      if (!replay) return;
      cancelAnimationFrame(replay.frame);
      replay = null;
      status.textContent = "";
      label();
    }
    /* Stops and gives the lanes back to the player. */
    function leave() {
      halt();
      rest();
    }
    function rest() {
      if (run.steps.length) { context.render(); return; }
      var times = plainTimes();
      context.lanes.eagle2.mark(Infinity, ownTokens());
      context.lanes.eagle2.measure(ownTokens(), run.prefill);
      context.lanes.autoregressive.mark(Infinity, times.length);
      context.lanes.autoregressive.measure(times.length, times[times.length - 1] || 0);
      now = null;
      paint();
    }

    function tick(time) {
      if (!replay) return;
      // A page in the background gets no frames: it goes on where it was, one second later at most.
      replay.at += (replay.speed * Math.max(0, Math.min(1000, time - replay.before))) / 1000;
      replay.before = Math.max(time, replay.before);
      if (replay.at >= raceEnd()) { finish(); return; }
      if (!context.reduced() || time - replay.drawn >= CALM) {
        replay.drawn = time;
        show(replay.at);
      }
      replay.frame = requestAnimationFrame(tick);
    }

    /* Both lanes at one moment of their own clocks; the tokens of a step come together, at its end. */
    function show(seconds) {
      var steps = 0, times = plainTimes(), other = 0;
      while (steps < run.steps.length && stepEnd(steps) <= seconds) steps++;
      while (other < times.length && times[other] <= seconds) other++;
      var before = steps ? run.ends[steps - 1] : 0;
      var own = steps ? before + run.steps[steps - 1].e : seconds >= run.prefill ? Math.min(1, ownTokens()) : 0;
      var ownSeconds = Math.min(seconds, ownEnd()), otherSeconds = Math.min(seconds, times[times.length - 1] || 0);
      if (own !== replay.own) { replay.own = own; context.lanes.eagle2.mark(steps < run.steps.length ? before : Infinity, own); }
      context.lanes.eagle2.measure(own, ownSeconds);
      if (times.length) {
        if (other !== replay.other) { replay.other = other; context.lanes.autoregressive.mark(Infinity, other); }
        context.lanes.autoregressive.measure(other, otherSeconds);
      }
      now = { eagle2: [ownSeconds, own], autoregressive: times.length ? [otherSeconds, other] : null };
      paint();
    }

    /* Ends in the final state: the player goes there, so that lanes, tree and chart say the same. */
    function finish() {
      halt();
      if (run.steps.length) context.go(run.steps.length - 1, "accept");
      else rest();
      status.textContent = run.race.outcome;
    }

    /* ---- messages ---- */

    function load(message) {
      halt();
      clearDifference();
      run = message;
      now = linked = box = null;
      drawnFor = shown = "";
      status.textContent = "";
      root.hidden = replayBox.hidden = !run.race.ends.length;
      if (root.hidden) { plot.data = plot.layout = undefined; return; }
      plot.setAttribute("aria-label", run.race.spoken);
      caption.textContent = "Tokens against each lane's own time (" + run.clock + "; drawing is outside of it). A dot is a step of EAGLE-2: click it to open the step. " +
        (plainTimes().length ? "The circle and the square show both lanes at the player's place." : "The circle shows the player's place.");
      total.textContent = run.race.summary;
      remarks.textContent = run.race.remarks;
      ledger.hidden = !run.steps.length;
      showSplit();
      showDifference();
      fill();
      setTimeout(draw, 0); // after the tree, which people look at first
    }

    context.saveable("race-chart", "Race: tokens against own time", plot);
    label();
    return {
      roots: { head: replayBox, race: status, below: root },
      run: load,
      step: function (step, phase) {
        if (root.hidden) return;
        var key = context.state.step + ":" + context.state.beat;
        if (replay && (key !== shown || context.state.playing)) halt();
        shown = key;
        if (replay) { replay.own = replay.other = -1; return; } // the player has marked the lanes for itself
        follow(step, phase);
        current();
      },
      live: function () {
        halt();
        clearDifference();
        run = null;
        root.hidden = true;
      },
      link: function (link) {
        var step = link && link.step !== null && link.step !== undefined ? link.step : null;
        if (step === linked || !run) return;
        linked = step;
        highlight();
      },
      resize: draw,
    };
  }

  window.Eagle2Player.part("below", make);
})();
