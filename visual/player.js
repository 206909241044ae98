/* Plays recorded and live runs: two lanes of text and the draft tree of each step.
 *
 * Eagle2Player.mount(element, setup) builds the page part and returns {show(message)}.  Messages come from
 * visual/player.py: {kind: "run" | "live" | "stopped" | "note" | "clear", ...}.  Text of tokens is hostile: it goes into the page
 * as textContent only, and into Plotly escaped.
 *
 * Other files add parts: Eagle2Player.part(slot, make), slot being "side" (beside the tree, or below it), "race" (under the
 * lanes), "head" (beside the figures above them), "tools" (beside the phase buttons), "top" (above the race) or "below" (under
 * the player).  make(context) returns {root}, or {roots: {slot: element}} for several places, and, as needed: run(message) a run was loaded; step(step, phase, smooth) a step or phase is shown; live(message);
 * link(link) something is pointed at (see `linked`), null when nothing is; resize(); clicked(node) returning true where the
 * part used the click on a node; holds() returning true to keep Play from going on.
 */
(function () {
  "use strict";

  var PHASES = ["draft", "rerank", "flatten", "verify", "accept"];
  var AFTER = PHASES.length - 1; // beats after the draft passes
  var RERANK = 1, VERIFY = 3, ACCEPT = 4;
  var NAMES = { draft: "Draft", rerank: "Rerank", flatten: "Flatten", verify: "Verify", accept: "Accept" };
  var HOLD = { draft: 900, rerank: 1500, flatten: 1300, verify: 1500, accept: 1900 }; // ms at speed 1
  var ZOOMS = [0.5, 0.65, 0.8, 1, 1.25, 1.5, 2];
  var PIXELS = ["column", "row", "cut_row", "stub", "bus", "left", "top", "right", "bottom", "node", "cut_node", "label_font", "cut_font", "number_font"];
  var parts = [];
  var MOVE = 450; // ms, of the change between two pictures
  var ORIGINS = { f: "prefill", d: "drafted", b: "bonus", c: "correction", p: "plain" };
  var CONFIG = { displayModeBar: false, showSendToCloud: false, typesetMath: false, doubleClick: false, scrollZoom: false };
  var serial = 0;

  function el(tag, attributes) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) {
      var value = attributes[key];
      if (key === "text") node.textContent = value;
      else if (key === "class") node.className = value;
      else if (key.slice(0, 2) === "on") node.addEventListener(key.slice(2), value);
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value === true ? "" : value);
    });
    for (var i = 2; i < arguments.length; i++) if (arguments[i]) node.append(arguments[i]);
    return node;
  }

  function escape(text) {
    return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function isolate(text) {
    return /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]/.test(text) && text[0] !== "\u2068" ? "\u2068" + text + "\u2069" : text;
  }

  function cutTo(text, length) {
    var chars = Array.from(text);
    return chars.length <= length ? text : chars.slice(0, length - 1).join("") + "…";
  }

  /* The same short form as visual.theme.short; digits and probability as there. */
  function short(value) {
    if (value >= 0.995) return "1.0";
    if (value >= 0.0995) return value.toFixed(2).slice(1);
    if (value >= 0.000995) return value.toFixed(3).slice(1);
    if (value <= 0) return "0";
    return value.toExponential(0).replace("e+", "e");
  }

  function digits(value) { return String(Number(value.toPrecision(3))); }

  function probability(value) { return value >= 0.001 || value === 0 ? value.toFixed(4) : digits(value); }

  function plural(count, noun) {
    return count + " " + noun + (count === 1 ? "" : "s");
  }

  function icon(path) {
    var svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 16 16");
    svg.setAttribute("aria-hidden", "true");
    var shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
    shape.setAttribute("d", path);
    svg.append(shape);
    return svg;
  }

  var ICONS = {
    play: "M4 2.5v11l9.5-5.5z",
    pause: "M4 2.5h3v11h-3zM9 2.5h3v11h-3z",
    previous: "M11 3v10l-6-5z",
    next: "M5 3v10l6-5z",
    firstStep: "M3 3h2v10h-2zM13 3v10l-7-5z",
    lastStep: "M11 3h2v10h-2zM3 3v10l7-5z",
  };

  var COPIED = "\u29c9"; // beside the confidence of a node that prompt lookup proposed; as in visual.tree

  /* ---- one step, unpacked and laid out ---- */

  function sums(differences) {
    var at = 0;
    return differences.map(function (by) { return (at += by); });
  }

  function unpack(packed, tokens, number) {
    var raw = Object.assign({}, packed, { p: sums(packed.p), o: sums(packed.o) });
    var n = raw.t.length;
    var step = { number: number, n: n, raw: raw, parents: raw.p, nodes: [], passes: raw.s, accepted: raw.a };
    var fed = {};
    raw.s.forEach(function (nodes, pass) { nodes.forEach(function (node) { fed[node] = pass; }); });
    var verdict = new Array(n).fill("cut");
    var lastPass = (raw.y || []).length ? Math.max(raw.s.length - 1, 0) : n;
    raw.k.forEach(function (node) { verdict[node] = "not reached"; });
    raw.j.forEach(function (node) { verdict[node] = "rejected"; });
    raw.a.forEach(function (node) { verdict[node] = "accepted"; });
    verdict[0] = "root";
    for (var i = 0; i < n; i++) {
      var entry = tokens[raw.t[i]];
      var parent = raw.p[i];
      step.nodes.push({
        node: i, parent: parent, depth: parent < 0 ? 0 : step.nodes[parent].depth + 1,
        token: typeof entry === "string" ? entry : entry[0], label: typeof entry === "string" ? entry : entry[1],
        confidence: raw.c[i], logValue: raw.v[i], value: Math.exp(Math.min(raw.v[i], 0)),
        born: parent < 0 ? -1 : parent in fed ? fed[parent] : Math.min(step.nodes[parent].depth, lastPass),
        copied: false,
        kept: i === 0, verdict: verdict[i], prob: null, rank: null, choice: null, draw: null,
      });
    }
    (raw.y || []).forEach(function (node) { step.nodes[node].copied = true; });
    raw.k.forEach(function (node, row) {
      var entry = step.nodes[node];
      entry.kept = true;
      entry.prob = raw.q[row];
      entry.rank = raw.r[row];
    });
    [0].concat(raw.k).forEach(function (node, row) {
      var choice = tokens[raw.h[row]];
      step.nodes[node].choice = typeof choice === "string" ? choice : choice[0];
      step.nodes[node].choiceProb = raw.w[row];
    });
    raw.d.forEach(function (pair) { step.nodes[pair[0]].draw = pair[1]; });
    var end = raw.a.length ? raw.a[raw.a.length - 1] : 0;
    var next = tokens[raw.n];
    step.next = {
      node: n, parent: end, depth: step.nodes[end].depth + 1, kind: raw.b, counted: raw.e > raw.a.length, kept: true,
      token: typeof next === "string" ? next : next[0], label: typeof next === "string" ? next : next[1],
    };
    step.below = new Array(n).fill(0);
    step.cutChildren = new Array(n).fill(0);
    for (var k = n - 1; k > 0; k--) {
      step.below[raw.p[k]] += step.below[k] + (step.nodes[k].kept ? 0 : 1);
      if (!step.nodes[k].kept) step.cutChildren[raw.p[k]]++;
    }
    step.maxDepth = step.nodes.reduce(function (max, node) { return Math.max(max, node.depth); }, step.next.depth);
    step.rows = [0].concat(raw.k); // nodes in the row order of the target's pass
    step.rowOf = {};
    step.rows.forEach(function (node, row) { step.rowOf[node] = row; });
    step.beats = Math.max(raw.s.length, 1) + AFTER;
    return step;
  }

  /* Rows of visual.tree.place: one per leaf, the first child on its parent's row. */
  function place(step, open, sizes) {
    var row = {}, lastRow = {}, heights = [];
    step.raw.o.forEach(function (node) {
      var entry = node === step.n ? step.next : step.nodes[node];
      var parent = entry.parent;
      if (!entry.kept && (!(parent in row) || !open(parent))) return;
      if (parent >= 0 && !(parent in lastRow)) row[node] = row[parent];
      else { row[node] = heights.length; heights.push(entry.kept ? sizes.row : sizes.cut_row); }
      if (parent >= 0) lastRow[parent] = row[node];
    });
    var folded = [], hangs = {};
    step.nodes.forEach(function (entry) {
      if (!step.cutChildren[entry.node] || !(entry.node in row) || open(entry.node)) return;
      folded.push(entry.node);
      if (entry.node in lastRow) hangs[lastRow[entry.node]] = true;
    });
    var y = sizes.top - heights[0], tops = [];
    heights.forEach(function (height, number) { y += height + (hangs[number - 1] ? sizes.stub : 0); tops.push(y); });
    var ys = [];
    for (var i = 0; i <= step.n; i++) ys.push(i in row ? tops[row[i]] : null);
    return {
      y: ys,
      stubs: folded.map(function (node) {
        return { node: node, y: tops[node in lastRow ? lastRow[node] : row[node]], hanging: node in lastRow };
      }),
      height: tops[tops.length - 1] + sizes.bottom + sizes.stub,
    };
  }

  function mixColor(low, high, share) {
    function part(color, at) { return parseInt(color.slice(at, at + 2), 16); }
    var out = "#";
    [1, 3, 5].forEach(function (at) {
      out += Math.round(part(low, at) + (part(high, at) - part(low, at)) * share).toString(16).padStart(2, "0");
    });
    return out;
  }

  /* The same as visual.theme.ink_on. */
  function inkOn(color) {
    function part(at) { return parseInt(color.slice(at, at + 2), 16); }
    return 299 * part(1) + 587 * part(3) + 114 * part(5) > 120000 ? "#0f141b" : "#ffffff";
  }

  function scaled(sizes, zoom) {
    var out = Object.assign({}, sizes, { zoom: zoom });
    PIXELS.forEach(function (name) { out[name] = sizes[name] * zoom; });
    return out;
  }

  function hover(node) {
    var lines = ["<b>" + escape(isolate(cutTo(node.token, 60))) + "</b>"];
    if (node.node) {
      lines.push("confidence " + probability(node.confidence) + (node.copied ? " (prompt lookup's: copied from earlier text)" : ""));
      lines.push("value " + digits(node.value));
    }
    if (node.prob !== null) lines.push("target probability " + probability(node.prob) + " (rank " + (node.rank + 1) + ")");
    if (node.draw !== null) lines.push("draw " + node.draw.toFixed(4));
    lines.push(node.verdict);
    if (node.choice !== null) {
      lines.push("target's choice after it: " + escape(isolate(cutTo(node.choice, 30))) + " (" + node.choiceProb.toFixed(2) + ")");
    }
    return lines.join("<br>");
  }

  /* Plotly traces of one step at one beat; visual.tree.figure draws the same from Python. */
  function picture(step, beat, view, setup) {
    var sizes = view.sizes, z = sizes.zoom, palette = setup.palettes[view.scheme];
    var phase = phaseOf(step, beat), late = PHASES.indexOf(phase);
    var pass = phase === "draft" ? beat : Infinity;
    var placed = view.placed, column = view.column;
    var data = {};
    setup.templates[view.scheme].forEach(function (base) { data[base.name] = { x: [], y: [] }; });

    function x(depth) { return sizes.left + depth * column; }
    function add(layer, px, py, values) {
      data[layer].x.push(px);
      data[layer].y.push(py);
      Object.keys(values || {}).forEach(function (key) { (data[layer][key] = data[layer][key] || []).push(values[key]); });
    }
    function edge(layer, x0, y0, x1, y1, key) {
      var bus = x0 + sizes.bus, r = Math.min(6 * z, Math.abs(y1 - y0) / 2), id = 0;
      [[x0, y0], [bus - r, y0], [bus - r * 0.3, y0 + r * 0.3], [bus, y0 + r], [bus, y1 - r],
        [bus + r * 0.3, y1 - r * 0.3], [bus + r, y1], [x1, y1], [null, null]].forEach(function (point) {
        add(layer, point[0], point[1], { ids: key + "." + id++ });
      });
    }
    function key(node) { return node === 0 ? "r" + step.number : "s" + step.number + "n" + node; }

    var fed = phase === "draft" ? step.passes[beat] || [] : [];
    step.nodes.forEach(function (node) {
      var y = placed.y[node.node];
      if (y === null || node.born > pass) return;
      var px = x(node.depth);
      var cut = node.verdict === "cut" && late >= 1;
      var accepted = late === ACCEPT && (node.verdict === "accepted" || node.verdict === "root");
      var rejected = late === ACCEPT && node.verdict === "rejected";
      if (node.parent >= 0) {
        edge(accepted ? "accepted" : cut ? "cut-edges" : "edges", x(node.depth - 1), placed.y[node.parent], px, y, key(node.node));
      }
      var small = node.verdict === "cut";
      var share = 1 - Math.max(sizes.floor, Math.min(0, node.logValue)) / sizes.floor;
      var shade = mixColor(palette.value_low, palette.value_high, share);
      add("nodes", px, y, {
        ids: key(node.node), hovertext: hover(node), symbol: "circle",
        size: small ? sizes.cut_node : sizes.node + (accepted ? 2 * z : 0),
        color: accepted ? palette.accepted : rejected ? palette.rejected : cut ? palette.paper : shade,
        outline: accepted ? palette.accepted : cut ? palette.cut : palette.outline,
        customdata: node.node,
      });
      if (small) {
        add("labels", px + 9 * z, y - 6 * z, { ids: key(node.node), text: escape(node.label), size: sizes.cut_font, color: palette.dim });
      } else {
        var figure = node.node === 0 ? "" : short(late < VERIFY ? node.value : node.prob);
        if (phase === "flatten") figure = step.position === null ? "" : "@" + (step.position + node.depth);
        var tail = figure && ' <span style="font-size:' + sizes.number_font + "px;color:" + palette.dim + '">' + figure + "</span>";
        add("labels", px + 12 * z, y - 10 * z, { ids: key(node.node), text: escape(node.label) + tail, size: sizes.label_font, color: palette.ink });
        if (node.node) add("confidences", px - 12 * z, y - 6 * z, { ids: key(node.node), text: (node.copied ? COPIED : "") + short(node.confidence), size: sizes.number_font });
      }
      if (fed.indexOf(node.node) >= 0) add("rings", px, y, { ids: key(node.node), size: (small ? sizes.cut_node : sizes.node) + 8 * z });
      if (late === VERIFY && node.rank === 0) add("rings", px, y, { ids: key(node.node), size: sizes.node + 8 * z });
      if (accepted || rejected) {
        add("marks", px, y, {
          ids: key(node.node), text: accepted ? "✓" : "×", color: accepted ? palette.accepted_ink : palette.rejected_ink,
          size: sizes.label_font,
        });
      } else if (phase === "flatten" && node.node in step.rowOf) {
        add("marks", px, y, { ids: key(node.node), text: String(step.rowOf[node.node]), color: inkOn(shade), size: sizes.number_font });
      }
    });
    placed.stubs.forEach(function (stub) {
      var node = step.nodes[stub.node];
      if (node.born > pass || bornOfCut(step, stub.node) > pass) return;
      var px = x(node.depth) + (stub.hanging ? sizes.bus : sizes.node / 2);
      var x1 = stub.hanging ? px : px + 18 * z, y1 = stub.hanging ? stub.y + 10 * z : stub.y;
      data["stub-lines"].x.push(px, x1, null);
      // Until the last phase the row of the target's own token is empty: the stub hangs from the row above it.
      var start = stub.y;
      if (late < ACCEPT && stub.node === step.next.parent) {
        start = placed.y[stub.node];
        step.nodes.forEach(function (child) { if (child.parent === stub.node && placed.y[child.node] !== null) start = Math.max(start, placed.y[child.node]); });
      }
      data["stub-lines"].y.push(start, y1, null);
      var children = step.cutChildren[stub.node], nodes = hidden(step, stub.node);
      add("stubs", x1 + 2 * z, stub.hanging ? y1 - 3 * z : y1 + 2 * z, {
        size: sizes.number_font,
        text: "+" + children, customdata: stub.node,
        hovertext: children + " cut child" + (children === 1 ? "" : "ren") + (nodes > children ? ", " + nodes + " nodes with all below" : ""),
      });
    });
    if (late === ACCEPT) {
      var next = step.next, ny = placed.y[step.n], nx = x(next.depth), id = "r" + (step.number + 1);
      edge("own", x(next.depth - 1), placed.y[next.parent], nx, ny, id);
      add("nodes", nx, ny, {
        ids: "t" + step.number, symbol: "star", size: sizes.node + 4 * z, color: palette.own, outline: palette.own, customdata: step.n,
        hovertext: "<b>" + escape(isolate(cutTo(next.token, 60))) + "</b><br>" + next.kind,
      });
      add("labels", nx + 12 * z, ny - 10 * z, { ids: id, text: "<b>" + escape(next.label) + "</b>", size: sizes.label_font, color: palette.own_ink });
    }
    return setup.templates[view.scheme].map(function (base) {
      var columns = data[base.name], trace = Object.assign({}, base, columns);
      ["size", "color", "outline", "symbol"].forEach(function (name) { delete trace[name]; });
      if (base.mode === "markers") {
        trace.marker = Object.assign({}, base.marker, { size: columns.size || [] });
        if (columns.symbol) { trace.marker.symbol = columns.symbol; trace.marker.color = columns.color; }
        trace.marker.line = columns.outline ? { color: columns.outline, width: 1.25 } : { width: 1.75 };
      } else if (base.mode === "text") {
        trace.textfont = Object.assign({}, base.textfont);
        if (columns.size) trace.textfont.size = columns.size;
        if (columns.color) trace.textfont.color = columns.color;
      }
      return trace;
    });
  }

  function bornOfCut(step, parent) {
    var born = Infinity;
    for (var i = 1; i < step.n; i++) if (step.parents[i] === parent && !step.nodes[i].kept) born = Math.min(born, step.nodes[i].born);
    return born;
  }

  function hidden(step, parent) {
    var count = 0;
    for (var i = 1; i < step.n; i++) if (step.parents[i] === parent && !step.nodes[i].kept) count += 1 + step.below[i];
    return count;
  }

  function phaseOf(step, beat) {
    var drafts = step.beats - AFTER;
    return beat < drafts ? "draft" : PHASES[1 + beat - drafts];
  }

  /* ---- a lane of text ---- */

  function Lane(id, name, about) {
    this.meter = el("span", { class: "e2-meter", "data-testid": "meter-" + id });
    this.text = el("div", { class: "e2-text", dir: "auto", "data-testid": "text-" + id, tabindex: "0", role: "region", "aria-label": name + ", text" });
    this.root = el("article", { class: "e2-lane", "data-testid": "lane-" + id },
      el("header", {}, el("h2", { text: name, title: about }), this.meter), this.text);
    this.shown = [];
  }

  Lane.prototype.set = function (lane) {
    var same = this.shown.length <= lane.pieces.length && this.shown.every(function (piece, i) { return piece === lane.pieces[i]; });
    if (!same) { this.text.textContent = ""; this.shown = []; }
    var atEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 30;
    for (var i = this.shown.length; i < lane.pieces.length; i++) {
      this.text.append(el("span", { class: "e2-token e2-" + ORIGINS[lane.origins[i]], "data-i": i, "data-origin": ORIGINS[lane.origins[i]], text: lane.pieces[i] }));
      this.shown.push(lane.pieces[i]);
    }
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
  };

  /* Tokens from `end` on are not made yet, those from `start` to `end` were made just now. */
  Lane.prototype.mark = function (start, end) {
    var spans = this.text.children;
    for (var i = 0; i < spans.length; i++) {
      spans[i].classList.toggle("e2-future", i >= end);
      spans[i].classList.toggle("e2-now", i >= start && i < end);
    }
    var span = spans[Math.min(end, spans.length) - 1];
    if (span && this.text.scrollHeight > this.text.clientHeight) {
      var top = span.offsetTop - this.text.offsetTop;
      if (top < this.text.scrollTop || top + span.offsetHeight > this.text.scrollTop + this.text.clientHeight) {
        this.text.scrollTop = Math.max(0, top - this.text.clientHeight / 2);
      }
    }
  };

  Lane.prototype.link = function (token) {
    var now = this.text.querySelector(".e2-linked"), next = token === null ? null : this.text.children[token];
    if (now && now !== next) now.classList.remove("e2-linked");
    if (next) next.classList.add("e2-linked");
  };

  Lane.prototype.measure = function (tokens, seconds) {
    this.meter.textContent = plural(tokens, "token") + " · " + seconds.toFixed(2) + " s · " + (seconds > 0 ? (tokens / seconds).toFixed(1) : "0.0") + " tokens/s";
  };

  /* ---- the player ---- */

  function mount(host, setup) {
    var id = "e2-" + ++serial;
    var sizes = scaled(setup.sizes, 1);
    var state = { kind: "empty", run: null, steps: [], step: 0, beat: 0, playing: false, speed: 1, fold: null, open: {}, zoom: ZOOMS.indexOf(1), link: null, pin: null };
    var saveables = [], slots = {}, made = [];
    var timer = 0, drawnKey = "", drawCost = 20, lastDraw = 0, pending = 0, frame = 0, busy = Promise.resolve();
    var reduced = window.matchMedia("(prefers-reduced-motion: reduce)");
    var systemDark = window.matchMedia("(prefers-color-scheme: dark)");

    function figureBox(testid, name, about) {
      var value = el("dd", { "data-testid": testid, text: "–" });
      return { value: value, root: el("div", { class: "e2-figure", title: about }, el("dt", { text: name }), value) };
    }
    var speedup = figureBox("speedup", "Speed-up", "Tokens per second of the EAGLE-2 lane over those of the autoregressive lane, each on its own clock");
    var tau = figureBox("tau", "τ, tokens per target pass", "Mean number of tokens that one pass of the target gives, its own token included");
    var same = figureBox("same-tokens", "Same tokens?", "Whether both lanes gave the same token ids");
    ["top", "head", "race", "tools", "side", "below"].forEach(function (name) { slots[name] = el("div", { class: "e2-slot e2-slot-" + name }); });
    var lanes = {
      eagle2: new Lane("eagle2", "EAGLE-2", "Drafts a tree with the draft head, verifies it in one pass of the target"),
      autoregressive: new Lane("autoregressive", "Autoregressive", "The same target alone: one pass for each token"),
    };
    var note = el("p", { class: "e2-note", role: "status", "data-testid": "note" });
    var prompt = el("p", { class: "e2-prompt", dir: "auto", "data-testid": "run-prompt" });
    var facts = el("dl", { class: "e2-facts", "data-testid": "run-facts" });
    var gist = el("span", { "data-testid": "run-gist" });
    var about = el("div", { class: "e2-about", "data-testid": "run-about" }, setup.standalone ? null : prompt,
      el("details", {}, el("summary", {}, gist), facts));
    var race = el("section", { class: "e2-race", "aria-label": "Race" },
      el("div", { class: "e2-race-head" }, el("dl", { class: "e2-figures" }, speedup.root, tau.root, same.root),
        el("ul", { class: "e2-legend e2-origins", "aria-label": "Where a token came from" },
          originKey("drafted", "accepted"), originKey("bonus", "bonus"), originKey("correction", "correction"), originKey("plain", "plain")),
        slots.head),
      el("div", { class: "e2-lanes" }, lanes.eagle2.root, lanes.autoregressive.root), slots.race);

    function originKey(origin, text) {
      return el("li", {}, el("span", { class: "e2-token e2-" + origin, text: "token" }), " " + text);
    }

    function button(name, path, action, testid) {
      return el("button", { type: "button", class: "e2-button", "aria-label": name, title: name, "data-testid": testid, onclick: action }, icon(path));
    }
    var playButton = button("Play", ICONS.play, toggle, "play");
    playButton.classList.add("e2-primary");
    var slider = el("input", { type: "range", min: 1, max: 1, value: 1, step: 1, "data-testid": "step-slider", "aria-label": "Step", oninput: function () { stop(); go(+slider.value - 1, Infinity, true); } });
    var stepText = el("output", { class: "e2-step", "data-testid": "step" });
    var bars = el("div", { class: "e2-bars", "aria-hidden": "true" });
    var speed = el("select", { "aria-label": "Speed", title: "Speed", "data-testid": "speed", onchange: function () { state.speed = +speed.value; if (state.playing) schedule(); } });
    [0.25, 0.5, 1, 2, 4].forEach(function (value) { speed.append(el("option", { value: value, text: value + "×", selected: value === 1 })); });
    function tool(text, testid, action, label) {
      return el("button", { type: "button", class: "e2-button e2-wide", "data-testid": testid, "aria-label": label || text, title: label || text, onclick: action, text: text });
    }
    var zoomOut = tool("−", "zoom-out", function () { zoom(-1); }, "Smaller");
    var zoomReset = tool("100 %", "zoom-reset", function () { zoom(0); }, "Original size");
    var zoomIn = tool("+", "zoom-in", function () { zoom(1); }, "Larger");
    var saveList = el("div", { class: "e2-menu-list" });
    var saveMenu = el("details", { class: "e2-menu" }, el("summary", { class: "e2-button e2-wide", "data-testid": "save", text: "Save" }), saveList);
    var linkButton = tool("Copy link", "copy-link", copyLink, "Copy a link to this step and phase");
    var linkField = el("input", { class: "e2-link", type: "text", readonly: true, hidden: true, "aria-label": "Link to this step and phase", "data-testid": "link" });
    var copied = el("span", { class: "e2-copied", role: "status", "data-testid": "copied" });
    var foldButton = el("button", { type: "button", class: "e2-button e2-wide", "data-testid": "fold", "aria-pressed": "false", onclick: toggleFold });
    var chips = {};
    var phases = el("div", { class: "e2-phases", role: "group", "aria-label": "Phase" });
    PHASES.forEach(function (phase) {
      chips[phase] = el("button", { type: "button", class: "e2-chip", "data-testid": "phase-" + phase, onclick: function () { stop(); goPhase(phase); } },
        el("span", { text: NAMES[phase] }), el("span", { class: "e2-dots", "aria-hidden": "true" }));
      phases.append(chips[phase]);
    });
    var said = el("p", { class: "e2-said", "data-testid": "phase", "aria-live": "polite", "aria-atomic": "true" });
    var clock = el("p", { class: "e2-clock", "data-testid": "clock" });
    var plot = el("div", { class: "e2-plot", "data-testid": "tree" });
    var scroll = el("div", { class: "e2-scroll", tabindex: "0", role: "region", "aria-label": "Draft tree" }, plot);
    var table = el("table", { class: "e2-table", "data-testid": "node-table" });
    var details = el("details", { class: "e2-details", ontoggle: fillTable }, el("summary", { text: "This step as a table" }), el("div", { class: "e2-tablebox", tabindex: "0", role: "region", "aria-label": "This step as a table" }, table));
    var meaning = el("li", { class: "e2-meaning" });
    var controls = el("div", { class: "e2-controls" },
      el("div", { class: "e2-buttons" },
        button("Previous step", ICONS.firstStep, function () { stop(); goStep(-1); }, "previous-step"),
        button("Previous phase", ICONS.previous, function () { stop(); move(-1); }, "previous-phase"),
        playButton,
        button("Next phase", ICONS.next, function () { stop(); move(1); }, "next-phase"),
        button("Next step", ICONS.lastStep, function () { stop(); goStep(1); }, "next-step")),
      el("div", { class: "e2-scrub" }, bars, slider), stepText, speed);
    var empty = el("p", { class: "e2-empty", text: setup.empty || "" });
    var player = el("section", {
      class: "e2-player", "data-testid": "player", tabindex: "0", role: "group", id: id,
      "aria-label": "Draft tree, step by step. Arrow right and left: phase. Page up and down: step. Space: play. Home and End: first and last step.",
      onkeydown: keyed,
    }, controls,
      el("div", { class: "e2-row" }, phases, el("div", { class: "e2-tools" }, slots.tools, foldButton,
        el("span", { class: "e2-group", role: "group", "aria-label": "Size of the tree" }, zoomOut, zoomReset, zoomIn), saveMenu, linkButton)),
      linkField, copied, said, el("div", { class: "e2-stage" }, scroll, slots.side), treeLegend(), clock, details);
    var root = el("div", { class: "e2", "data-kind": "empty" }, note, about, slots.top, race, empty, player, slots.below);
    host.textContent = "";
    host.append(root);

    function treeLegend() {
      function item(svg, text) {
        var box = el("span", { class: "e2-swatch" });
        box.innerHTML = svg; // constant drawings below, no data
        return el("li", {}, box, text);
      }
      var open = '<svg viewBox="0 0 34 16" aria-hidden="true">';
      return el("ul", { class: "e2-legend", "aria-label": "Legend of the tree" },
        item(open + '<path class="k-accepted" d="M1 8h22"/><circle class="f-accepted" cx="25" cy="8" r="7"/><path class="k-check" d="M21.5 8.2l2.4 2.6 4.4-5"/></svg>', "accepted"),
        item(open + '<path class="k-own" d="M1 8h18"/><path class="f-own" d="M26 1l2.1 4.6 5 .5-3.8 3.3 1.1 4.9-4.4-2.6-4.4 2.6 1.1-4.9-3.8-3.3 5-.5z"/></svg>', "bonus or correction"),
        item(open + '<path class="k-edge" d="M1 8h18"/><circle class="f-rejected" cx="25" cy="8" r="7"/><path class="k-cross" d="M22.2 5.2l5.6 5.6m0-5.6l-5.6 5.6"/></svg>', "rejected"),
        item(open + '<path class="k-cut" d="M1 8h18"/><circle class="f-cut" cx="24" cy="8" r="3.5"/></svg>', "cut (+n: folded, click to open)"),
        item(open + '<circle class="f-value" cx="17" cy="8" r="5"/><circle class="k-ring" cx="17" cy="8" r="7.2"/></svg>', "ring: fed to the head; in Verify, the target's first choice"),
        el("li", {}, el("span", { class: "e2-ramp" }), "value, low to high (log)"), meaning);
    }

    function dark() {
      if (document.body.classList.contains("dark") || document.documentElement.classList.contains("dark")) return true;
      return Boolean(setup.standalone) && systemDark.matches;
    }

    function current() { return state.steps[state.step]; }

    function isOpen(step) {
      var all = state.fold === null ? step.n - 1 <= sizes.unfold_limit : !state.fold;
      return function (node) { return all || Boolean(state.open[step.number + ":" + node]); };
    }

    /* Size of the picture: the same for all steps of a run, so that nothing jumps while it plays. */
    function measureRun() {
      var height = 120, depth = 1;
      state.steps.forEach(function (step) {
        height = Math.max(height, place(step, isOpen(step), sizes).height);
        depth = Math.max(depth, step.maxDepth);
      });
      state.height = height;
      state.depth = depth;
    }

    function draw(smooth) {
      if (!window.Plotly || !current()) return;
      var step = current();
      var beside = wide();
      root.classList.toggle("e2-beside", beside);
      var room = scroll.clientWidth;
      if (!room) return; // not shown yet: the resize observer comes back
      var scheme = dark() ? "dark" : "light";
      root.dataset.scheme = scheme;
      var column = Math.max(sizes.column, Math.min(1.6 * sizes.column, (room - sizes.left - sizes.right) / state.depth));
      var width = Math.max(room, sizes.left + state.depth * column + sizes.right);
      var placed = place(step, isOpen(step), sizes);
      var height = Math.max(state.height, placed.height);
      var view = { scheme: scheme, column: column, placed: placed, sizes: sizes };
      var traces = picture(step, state.beat, view, setup);
      var layout = Object.assign({}, setup.layouts[scheme], { width: width, height: height });
      layout.xaxis = Object.assign({}, layout.xaxis, { range: [0, width] }); // in pixels, whatever the zoom
      layout.yaxis = Object.assign({}, layout.yaxis, { range: [height, 0] });
      follow(step, width, function (depth) { return sizes.left + depth * column; });
      var key = [scheme, width, height, state.kind].join();
      var started = performance.now();
      var first = !plot.classList.contains("js-plotly-plot");
      var moving = smooth && key === drawnKey && !reduced.matches && document.visibilityState === "visible";
      drawnKey = key;
      if (moving) {
        var length = Math.min(MOVE, (HOLD[phaseOf(step, state.beat)] / state.speed) * 0.5);
        layout.transition = { duration: length, easing: "cubic-in-out", ordering: "traces first" };
      }
      var token = ++frame;
      var done = first ? window.Plotly.newPlot(plot, traces, layout, CONFIG) : window.Plotly.react(plot, traces, layout, CONFIG);
      if (first) {
        plot.on("plotly_click", clicked);
        plot.on("plotly_hover", function (event) {
          plot.classList.add("e2-over");
          var point = event.points && event.points[0];
          if (point && point.data.name === "nodes") link({ step: current().number, node: point.customdata });
        });
        plot.on("plotly_unhover", function () { plot.classList.remove("e2-over"); link(null); });
        plot.on("plotly_afterplot", tag);
      }
      drawCost = 0.7 * drawCost + 0.3 * (performance.now() - started);
      lastDraw = performance.now();
      busy = Promise.resolve(done).then(function () { if (token === frame) { tag(); root.dataset.drawn = step.number + ":" + state.beat; } });
    }

    /* Where the tree is wider than the screen: keeps the part that just changed in sight. */
    function follow(step, width, x) {
      if (width <= scroll.clientWidth + 1) return;
      var phase = phaseOf(step, state.beat);
      var depth = phase === "draft" ? state.beat + 1 : phase === "accept" ? step.next.depth : 0;
      var left = Math.max(0, x(depth) + sizes.right - scroll.clientWidth);
      scroll.scrollTo({ left: left, behavior: reduced.matches ? "auto" : "smooth" });
    }

    /* Marks the drawn nodes for tests, scripts and style sheets. */
    function tag() {
      var step = current();
      if (!step) return;
      plot.querySelectorAll(".tracee2nodes .point").forEach(function (point) {
        var datum = point.__data__;
        var node = datum && plot.data[setup.nodesLayer].customdata[datum.i];
        if (node === undefined) return;
        point.setAttribute("data-node", node);
        point.setAttribute("data-verdict", node === step.n ? step.next.kind : step.nodes[node].verdict);
      });
      plot.querySelectorAll(".tracee2accepted .js-line, .tracee2own .js-line").forEach(function (line) { line.setAttribute("stroke-linecap", "round"); });
      showLink();
    }

    /* Two side views stand beside the tree where the tree leaves them room; else, and where there are more, all below it. */
    function wide() {
      var stage = scroll.parentNode.clientWidth;
      var views = slots.side.querySelectorAll(".e2-view:not([hidden])").length;
      return views > 0 && views < 3 && stage - (sizes.left + state.depth * sizes.column + sizes.right) >= 360;
    }

    /* ---- what belongs together: a token, its node, its row, its step ---- */

    /* {step, node} or {token} -> {step, node, row, token}, null where there is none; `token` counts the output from 0. */
    function linked(what) {
      if (!what) return null;
      var out = { step: null, node: null, row: null, token: null };
      var ends = state.run ? state.run.ends : null, s = what.step;
      if (what.token !== undefined && what.token !== null && ends) {
        out.token = what.token;
        for (s = state.steps.length - 1; s >= 0 && what.token < ends[s]; s--);
        if (s < 0) return out; // the first token: the prefill gave it
        out.step = s;
        var place = what.token - ends[s], path = state.steps[s].accepted;
        out.node = place < path.length ? path[place] : state.steps[s].n;
      } else {
        out.step = s;
        out.node = what.node === undefined ? null : what.node;
        var step = stepAt(s);
        if (step && ends && out.node !== null) {
          var at = step.accepted.indexOf(out.node);
          if (out.node === 0) out.token = ends[s] - 1;
          else if (at >= 0 && at < step.raw.e) out.token = ends[s] + at;
          else if (out.node === step.n && step.next.counted) out.token = ends[s] + step.accepted.length;
        }
      }
      var whose = stepAt(out.step);
      if (whose && out.node !== null && out.node in whose.rowOf) out.row = whose.rowOf[out.node];
      return out;
    }
    function stepAt(number) { return state.steps.find(function (step) { return step.number === number; }); }

    /* Points at something for as long as the pointer is on it; `pinned` until the step changes. */
    function link(what, pinned) {
      state.link = linked(what);
      if (pinned) state.pin = state.link;
      showLink();
    }
    function showLink() {
      var step = current(), now = state.link || state.pin;
      if (!step) return;
      plot.querySelectorAll(".e2-linked").forEach(function (point) { point.classList.remove("e2-linked"); });
      if (now && now.step === step.number && now.node !== null) {
        var point = plot.querySelector('.point[data-node="' + now.node + '"]');
        if (point) point.classList.add("e2-linked");
      }
      lanes.eagle2.link(now ? now.token : null);
      Array.prototype.forEach.call(bars.children, function (bar, i) { bar.classList.toggle("e2-linked", Boolean(now) && now.step === i); });
      made.forEach(function (part) { if (part.link) part.link(now); });
    }

    function clicked(event) {
      var point = event.points && event.points[0];
      if (!point) return;
      var step = current(), node = point.customdata;
      if (point.data.name !== "stubs" && made.some(function (part) { return part.clicked && part.clicked(node); })) return;
      stop();
      if (point.data.name === "stubs") state.open[step.number + ":" + node] = true;
      else if (state.open[step.number + ":" + node]) delete state.open[step.number + ":" + node];
      else {
        link({ step: step.number, node: node }, true);
        render(false);
        return;
      }
      draw(true);
    }

    function render(smooth) {
      var step = current();
      var live = state.kind === "live", whole = state.kind === "run";
      root.dataset.kind = state.kind;
      player.hidden = state.kind === "empty" || !step;
      empty.hidden = !player.hidden;
      about.hidden = !whole;
      slots.top.hidden = slots.head.hidden = slots.race.hidden = slots.below.hidden = slots.side.hidden = !whole;
      saveMenu.hidden = !whole;
      linkButton.hidden = !whole || setup.standalone || !state.run.id;
      race.hidden = state.kind === "empty";
      controls.hidden = !whole;
      details.hidden = live;
      if (!step) return;
      var phase = phaseOf(step, state.beat);
      player.dataset.step = step.number;
      player.dataset.phase = phase;
      player.dataset.beat = state.beat;
      player.dataset.accepted = phase === "accept" ? step.accepted.join() : "";
      player.dataset.next = phase === "accept" ? step.next.kind : "";
      player.dataset.playing = String(state.playing);
      said.setAttribute("aria-live", live ? "off" : "polite"); // nobody can listen to ten steps a second
      said.textContent = (!whole ? "Step " + (step.number + 1) + ". " : "") + step.raw.say[state.beat];
      PHASES.forEach(function (name) {
        var on = name === phase;
        chips[name].disabled = live;
        if (on) chips[name].setAttribute("aria-current", "step");
        else chips[name].removeAttribute("aria-current");
        chips[name].classList.toggle("e2-done", PHASES.indexOf(name) < PHASES.indexOf(phase));
        var dots = chips[name].lastChild, drafts = step.beats - AFTER;
        if (name === "draft") dots.textContent = Array.from({ length: drafts }, function (_, i) { return on && i === state.beat ? "●" : "○"; }).join("");
      });
      var copies = step.nodes.some(function (node) { return node.copied; });
      meaning.textContent = "On an edge: the head's confidence" + (copies ? ", or (" + COPIED + ") that of a copy of earlier text. " : ". ") + (phase === "flatten" ? "In a node: its row. Beside a token: its position id."
        : "Beside a token: " + (PHASES.indexOf(phase) < VERIFY ? "its value." : "the target's probability."));
      var ms = step.raw.ms;
      clock.textContent = "Step " + (step.number + 1) + ": draft " + (1000 * ms[0]).toFixed(1) + " ms, verify " + (1000 * ms[1]).toFixed(1) +
        " ms, commit " + (1000 * ms[2]).toFixed(1) + " ms" + (state.clock === "modelled" ? " (modelled)" : "") + "; " + plural(step.raw.e, "token") + " gained.";
      foldButton.textContent = isOpen(step)(-1) ? "Fold cut nodes" : "Show cut nodes";
      foldButton.setAttribute("aria-pressed", String(isOpen(step)(-1)));
      foldButton.hidden = !step.cutChildren.some(Boolean);
      if (whole) {
        slider.value = state.step + 1;
        slider.setAttribute("aria-valuetext", "step " + (state.step + 1) + " of " + state.steps.length);
        stepText.textContent = "Step " + (state.step + 1) + " of " + state.steps.length;
        Array.prototype.forEach.call(bars.children, function (bar, i) { bar.classList.toggle("e2-on", i === state.step); });
        var play = state.playing ? "pause" : "play";
        playButton.setAttribute("aria-label", state.playing ? "Pause" : "Play");
        playButton.title = state.playing ? "Pause" : "Play";
        playButton.replaceChildren(icon(ICONS[play]));
        markLanes(step, phase);
      }
      if (details.open) fillTable();
      zoomReset.textContent = Math.round(100 * ZOOMS[state.zoom]) + " %";
      zoomOut.disabled = state.zoom === 0;
      zoomIn.disabled = state.zoom === ZOOMS.length - 1;
      copied.textContent = "";
      linkField.hidden = true;
      draw(smooth);
      if (whole) made.forEach(function (part) { if (part.step) part.step(step, phase, smooth); });
    }

    /* Both lanes at the EAGLE-2 lane's own clock at this point of the run. */
    function markLanes(step, phase) {
      var run = state.run, accepted = phase === "accept";
      var ends = run.ends, seconds = run.clocks[step.number] + (accepted ? sum(step.raw.ms) : 0);
      var start = ends[step.number], end = accepted ? start + step.raw.e : start;
      var last = state.step === state.steps.length - 1 && accepted;
      lanes.eagle2.mark(start, end);
      lanes.eagle2.measure(end, seconds);
      if (!run.lanes.autoregressive) return;
      var times = run.lanes.autoregressive.times, count = 0;
      while (count < times.length && times[count] <= seconds + 1e-9) count++;
      if (last) { count = times.length; seconds = times.length ? times[times.length - 1] : 0; }
      lanes.autoregressive.mark(Infinity, count);
      lanes.autoregressive.measure(count, last ? seconds : Math.min(seconds, times.length ? times[times.length - 1] : 0));
    }

    function sum(values) { return values.reduce(function (total, value) { return total + value; }, 0); }

    function fillTable() {
      var step = current();
      if (!details.open || !step) return;
      var head = el("tr", {});
      ["node", "token", "after", "confidence", "value", "target probability", "rank", "verdict"].forEach(function (name) { head.append(el("th", { scope: "col", text: name })); });
      var body = el("tbody", {});
      step.raw.k.forEach(function (index) {
        var node = step.nodes[index];
        var cells = [index, node.token, step.nodes[node.parent].token, probability(node.confidence), digits(node.value), probability(node.prob), node.rank + 1, node.verdict];
        var row = el("tr", { "data-node": index, "data-verdict": node.verdict });
        cells.forEach(function (cell, i) { row.append(el("td", { text: String(cell), class: i === 1 || i === 2 ? "e2-mono" : "" })); });
        body.append(row);
      });
      table.replaceChildren(el("caption", { text: "Step " + (step.number + 1) + ": the kept nodes in row order" }), el("thead", {}, head), body);
    }

    /* ---- moving through the run ---- */

    function go(step, beat, smooth) {
      if (!state.steps.length) return;
      var before = state.step;
      state.step = Math.max(0, Math.min(state.steps.length - 1, step));
      state.beat = Math.max(0, Math.min(current().beats - 1, beat));
      if (before !== state.step) state.pin = null;
      render(smooth);
    }
    function move(by) {
      if (!state.steps.length) return false;
      var step = state.step, beat = state.beat + by;
      if (beat >= current().beats) { step++; beat = 0; }
      if (beat < 0) { step--; beat = Infinity; }
      if (step < 0 || step >= state.steps.length) return false;
      go(step, beat, true);
      return true;
    }
    function goStep(by) {
      if (!state.steps.length) return;
      var phase = phaseOf(current(), state.beat);
      var to = Math.max(0, Math.min(state.steps.length - 1, state.step + by));
      go(to, beatOf(state.steps[to], phase), true);
    }
    function beatOf(step, phase) { return phase === "draft" ? 0 : step.beats - AFTER - 1 + PHASES.indexOf(phase); }
    function goPhase(phase) { go(state.step, beatOf(current(), phase), true); }
    function schedule() {
      clearTimeout(timer);
      timer = setTimeout(function () {
        if (!made.some(function (part) { return part.holds && part.holds(); }) && move(1)) schedule();
        else { stop(); render(false); }
      }, HOLD[phaseOf(current(), state.beat)] / state.speed);
    }
    function toggle() {
      if (state.playing) { stop(); render(false); return; }
      if (!state.steps.length || state.kind !== "run") return;
      state.playing = true;
      if (state.step === state.steps.length - 1 && state.beat === current().beats - 1) go(0, 0, false);
      else render(false);
      schedule();
    }
    function stop() {
      clearTimeout(timer);
      state.playing = false;
    }
    function toggleFold() {
      stop();
      state.fold = isOpen(current())(-1);
      state.open = {};
      measureRun();
      render(true);
    }

    function keyed(event) {
      if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey || !current() || state.kind === "live") return;
      var target = event.target, tagName = target.tagName;
      if (tagName === "SELECT" || (target !== slider && tagName === "INPUT") || tagName === "TEXTAREA") return;
      var onButton = tagName === "BUTTON" || tagName === "SUMMARY";
      // The slider has its own arrow keys, and a tree wider than the screen scrolls with them.
      var arrows = target !== slider && (target !== scroll || scroll.scrollWidth <= scroll.clientWidth);
      if (event.key === " " && !onButton) toggle();
      else if (event.key === "ArrowRight" && arrows) { stop(); move(1) || render(false); }
      else if (event.key === "ArrowLeft" && arrows) { stop(); move(-1) || render(false); }
      else if (event.key === "ArrowDown" && arrows) { stop(); goStep(1); }
      else if (event.key === "ArrowUp" && arrows) { stop(); goStep(-1); }
      else if (event.key === "PageDown") { stop(); goStep(1); }
      else if (event.key === "PageUp") { stop(); goStep(-1); }
      else if (event.key === "+" || event.key === "=") zoom(1);
      else if (event.key === "-") zoom(-1);
      else if (event.key === "0") zoom(0);
      else if (event.key === "Home") { stop(); go(0, 0, true); }
      else if (event.key === "End") { stop(); go(state.steps.length - 1, Infinity, true); }
      else return;
      event.preventDefault();
    }
    if (setup.standalone) {
      document.addEventListener("keydown", function (event) { if (event.target === document.body) keyed(event); });
    }
    function tokenAt(event) {
      var i = event.target.dataset && event.target.dataset.i;
      return i === undefined || state.kind !== "run" ? null : +i;
    }
    lanes.eagle2.text.addEventListener("click", function (event) {
      var token = tokenAt(event), what = token === null ? null : linked({ token: token });
      if (!what || what.step === null) return;
      stop();
      go(what.step, Infinity, true);
      link(what, true);
    });
    lanes.eagle2.text.addEventListener("mouseover", function (event) {
      var token = tokenAt(event);
      link(token === null ? null : { token: token });
    });
    lanes.eagle2.text.addEventListener("mouseleave", function () { link(null); });

    /* ---- size, saving, links ---- */

    function zoom(by) {
      var to = by ? Math.max(0, Math.min(ZOOMS.length - 1, state.zoom + by)) : ZOOMS.indexOf(1);
      if (to === state.zoom || !current()) return;
      state.zoom = to;
      sizes = scaled(setup.sizes, ZOOMS[to]);
      measureRun();
      render(false);
    }

    /* "Save" offers each figure as SVG and PNG, with a caption that says what it is and how it was measured. */
    function saveable(name, label, div) {
      saveables.push(name);
      var buttons = ["svg", "png"].map(function (format) {
        return el("button", { type: "button", class: "e2-menu-item", "data-testid": "save-" + name + "-" + format, text: label + ", " + format.toUpperCase(),
          onclick: function () { saveMenu.open = false; saveFigure(name, label, div, format); } });
      });
      saveList.append.apply(saveList, buttons);
      return buttons; // for who has no figure at times
    }
    function caption(label) {
      var run = state.run, short = run.prompt.length > 60 ? run.prompt.slice(0, 59) + "…" : run.prompt;
      return label + ", step " + (state.step + 1) + " of " + state.steps.length + ", " + NAMES[phaseOf(current(), state.beat)].toLowerCase() + ", “" + short.replace(/\s+/g, " ") + "”. " +
        run.about.map(function (fact) { return fact[0] + " " + fact[1]; }).slice(0, 6).join("; ") + ".";
    }
    function saveFigure(name, label, div, format) {
      if (!div.layout || !window.Plotly) return;
      var palette = setup.palettes[dark() ? "dark" : "light"], width = div.layout.width || div.clientWidth, height = div.layout.height || div.clientHeight;
      var words = caption(label).split(" "), lines = [""], room = Math.max(30, Math.floor((width - 24) / 5.6));
      words.forEach(function (word) {
        if ((lines[lines.length - 1] + word).length > room) lines.push("");
        lines[lines.length - 1] += word + " ";
      });
      var foot = 14 * lines.length + 16, margin = Object.assign({ l: 0, r: 0, t: 0, b: 0, pad: 0 }, div.layout.margin);
      var layout = Object.assign({}, div.layout, {
        width: width, height: height + foot, paper_bgcolor: palette.paper, plot_bgcolor: palette.paper, transition: undefined,
        margin: Object.assign({}, margin, { b: margin.b + foot }),
        annotations: (div.layout.annotations || []).concat([{
          text: lines.map(escape).join("<br>"), xref: "paper", yref: "paper", x: 0, y: 0, xanchor: "left", yanchor: "top", align: "left", showarrow: false,
          xshift: 10 - margin.l, yshift: -margin.b - 8, font: { size: 10, color: palette.dim },
        }]),
      });
      window.Plotly.toImage({ data: div.data, layout: layout, config: CONFIG }, { format: format, width: width, height: height + foot, scale: format === "png" ? 2 : 1 })
        .then(function (url) { download(url, fileName(name) + "." + format); })
        .catch(function () { setNote("The picture could not be made.", "error"); });
    }
    function fileName(name) { return "eagle2-" + (state.run.id ? state.run.id + "-" : "") + "step-" + (state.step + 1) + "-" + phaseOf(current(), state.beat) + "-" + name; }
    function download(url, name) {
      var anchor = el("a", { href: url, download: name });
      document.body.append(anchor);
      anchor.click();
      anchor.remove();
    }
    /* The page of visual.player.page with this run in it. */
    function savePage() {
      saveMenu.open = false;
      fetch(setup.page_url).then(function (answer) {
        if (!answer.ok) throw new Error(answer.status);
        return answer.text();
      }).then(function (text) {
        var parts = text.split(setup.run_mark);
        if (parts.length !== 2) throw new Error("no place for the run");
        var run = JSON.stringify(Object.assign({}, state.message, { id: "", play: false, note: "", at: { step: state.step, phase: phaseOf(current(), state.beat) } }))
          .replace(/[<>&\u2028\u2029]/g, function (char) { return "\\u" + char.charCodeAt(0).toString(16).padStart(4, "0"); });
        var url = URL.createObjectURL(new Blob([parts[0], run, parts[1]], { type: "text/html" }));
        download(url, "eagle2" + (state.run.id ? "-" + state.run.id : "") + ".html");
        setTimeout(function () { URL.revokeObjectURL(url); }, 10000);
      }).catch(function () { setNote("The page could not be made; is the server still running?", "error"); });
    }
    function copyLink() {
      var url = location.origin + location.pathname + "?run=" + encodeURIComponent(state.run.id) + "&step=" + (state.step + 1) + "&phase=" + phaseOf(current(), state.beat);
      function show() { linkField.value = url; linkField.hidden = false; linkField.select(); }
      stop();
      render(false);
      if (!navigator.clipboard) { show(); return; } // only a secure page has one
      navigator.clipboard.writeText(url).then(function () { copied.textContent = "Link copied."; }, show);
    }

    /* ---- messages ---- */

    function figures(message) {
      speedup.value.textContent = message.speedup === null ? "–" : message.speedup.toFixed(2) + "×";
      tau.value.textContent = message.tau === null ? "–" : message.tau.toFixed(2);
      same.value.textContent = message.same || "–";
      same.root.dataset.same = message.equal === true ? "yes" : message.equal === false ? "no" : "";
    }

    function showAbout(run) {
      prompt.textContent = run.prompt;
      var fact = {};
      run.about.forEach(function (pair) { fact[pair[0]] = pair[1]; });
      gist.textContent = ["model", "dtype", "device", "tree", "decoding"].map(function (name) { return fact[name]; }).filter(Boolean).join(" · ") +
        (fact.recorded ? " · recorded " + fact.recorded.slice(0, 10) : "");
      facts.replaceChildren();
      run.about.forEach(function (pair) { facts.append(el("div", {}, el("dt", { text: pair[0] }), el("dd", { text: pair[1] }))); });
    }

    function setNote(text, kind) {
      note.textContent = text || "";
      note.dataset.level = kind || "info";
      note.hidden = !text;
    }

    function showRun(run) {
      stop();
      state.kind = "run";
      state.message = run;
      state.run = run = Object.assign({}, run);
      state.link = state.pin = null;
      state.clock = run.clock;
      state.open = {};
      var position = run.first_position;
      state.steps = run.steps.map(function (raw, number) {
        var step = unpack(raw, run.tokens, number);
        step.position = position; // position id of the root
        position += raw.e;
        return step;
      });
      run.ends = []; run.clocks = [];
      showAbout(run);
      var end = run.lanes.eagle2.pieces.length ? 1 : 0, seconds = run.prefill;
      run.steps.forEach(function (raw) { run.ends.push(end); run.clocks.push(seconds); end += raw.e; seconds += sum(raw.ms); });
      lanes.eagle2.set(run.lanes.eagle2);
      lanes.autoregressive.root.hidden = !run.lanes.autoregressive;
      if (run.lanes.autoregressive) lanes.autoregressive.set(run.lanes.autoregressive);
      figures(run);
      slider.max = Math.max(1, state.steps.length);
      bars.textContent = "";
      var most = Math.max.apply(null, [1].concat(run.steps.map(function (raw) { return raw.e; })));
      run.steps.forEach(function (raw, i) {
        var bar = el("span", { class: "e2-bar", title: "step " + (i + 1) + ": " + plural(raw.e, "token"), onclick: function () { stop(); go(i, Infinity, true); } });
        bar.style.setProperty("--share", raw.e / most);
        bar.style.setProperty("--own", raw.e > raw.a.length ? 1 / raw.e : 0);
        bars.append(bar);
      });
      if (!state.steps.length) {
        lanes.eagle2.measure(end, seconds);
        if (run.lanes.autoregressive) { var times = run.lanes.autoregressive.times; lanes.autoregressive.measure(times.length, times[times.length - 1] || 0); }
      }
      measureRun();
      setNote(run.note, "info");
      made.forEach(function (part) { if (part.run) part.run(run); });
      state.step = 0;
      if (!state.steps.length) { render(false); return; }
      var play = run.play && !reduced.matches, at = run.at || (run.play ? { step: 0, phase: "draft" } : { step: state.steps.length - 1, phase: "accept" });
      state.playing = play;
      at = Math.max(0, Math.min(state.steps.length - 1, at.step));
      go(at, PHASES.indexOf(run.at && run.at.phase) >= 0 ? beatOf(state.steps[at], run.at.phase) : run.play ? 0 : Infinity, false);
      if (play) schedule();
    }

    function showLive(message) {
      stop();
      if (state.kind !== "live") { lastDraw = -Infinity; state.height = 0; state.depth = 1; state.open = {}; }
      state.kind = "live";
      state.run = null;
      state.link = state.pin = null;
      made.forEach(function (part) { if (part.live) part.live(message); });
      ["eagle2", "autoregressive"].forEach(function (name) {
        var lane = message.lanes[name];
        lanes[name].root.hidden = false;
        lanes[name].set(lane);
        lanes[name].mark(Infinity, Infinity);
        lanes[name].measure(lane.pieces.length, lane.seconds);
      });
      figures(message);
      setNote(message.note, "info");
      if (message.step) {
        var step = unpack(message.step, message.tokens, message.number);
        step.position = null;
        state.steps = [step];
        state.step = 0;
        state.beat = step.beats - 1;
        state.height = Math.max(state.height || 120, place(step, isOpen(step), sizes).height); // grows only, so nothing jumps
        state.depth = Math.max(state.depth || 1, step.maxDepth);
      } else state.steps = [];
      // Drawing may take a twelfth of the time at most: the model may be running on the same cores.
      clearTimeout(pending);
      var wait = lastDraw + Math.min(2000, 11 * drawCost) - performance.now();
      if (wait > 0 && step) {
        pending = setTimeout(function () { if (state.kind === "live") render(false); }, wait);
      } else render(false);
    }

    function show(message) {
      if (!message) return;
      clearTimeout(pending);
      if (message.kind === "run") showRun(message);
      else if (message.kind === "live") showLive(message);
      else if (message.kind === "note") setNote(message.note, message.level);
      else if (message.kind === "stopped") {
        if (state.kind === "live") state.kind = "stopped"; // the newest step can still be looked at
        setNote(message.note, message.level);
        render(false);
      }
      else if (message.kind === "clear") {
        stop();
        state.kind = "empty"; state.steps = []; state.run = null;
        setNote(message.note, message.level);
        render(false);
      }
    }

    /* What a part may use; reading `state` is free, changing it goes through these functions. */
    var context = {
      setup: setup, state: state, root: root, lanes: lanes,
      scheme: function () { return dark() ? "dark" : "light"; },
      palette: function () { return setup.palettes[dark() ? "dark" : "light"]; },
      reduced: function () { return reduced.matches; },
      step: current,
      phase: function () { return current() ? phaseOf(current(), state.beat) : null; },
      go: function (step, phase) { stop(); go(step, phase ? beatOf(state.steps[Math.max(0, Math.min(state.steps.length - 1, step))], phase) : Infinity, true); },
      play: function () { if (!state.playing) toggle(); },
      stop: function () { if (state.playing) { stop(); render(false); } },
      link: link, render: function () { if (current()) render(false); },
      note: setNote, saveable: saveable,
      /* Draws into a figure of a part's own; resolves when it is drawn. */
      plot: function (div, traces, layout) {
        if (!window.Plotly) return Promise.resolve();
        return div.classList.contains("js-plotly-plot") ? window.Plotly.react(div, traces, layout, CONFIG) : window.Plotly.newPlot(div, traces, layout, CONFIG);
      },
      /* Draws a step's tree into another div, as the player's own; for views that show several trees. */
      tree: function (div, step, phase, width) { return drawTree(div, step, phase, width, setup, dark() ? "dark" : "light"); },
    };
    saveable("tree", "Tree", plot);
    parts.forEach(function (entry) {
      var part = entry.make(context);
      made.push(part);
      if (part.root) slots[entry.slot].append(part.root);
      Object.keys(part.roots || {}).forEach(function (slot) { slots[slot].append(part.roots[slot]); });
    });
    if (setup.page_url) saveList.append(el("button", { type: "button", class: "e2-menu-item", "data-testid": "save-page", text: "The run as a page (.html)", onclick: savePage }));
    saveMenu.addEventListener("focusout", function (event) { if (!saveMenu.contains(event.relatedTarget)) saveMenu.open = false; });

    var lastWidth = 0;
    new ResizeObserver(function () {
      if (Math.abs(scroll.clientWidth - lastWidth) < 1) return;
      lastWidth = scroll.clientWidth;
      redraw();
    }).observe(scroll);
    new MutationObserver(function () { if ((dark() ? "dark" : "light") !== root.dataset.scheme) redraw(); }).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    systemDark.addEventListener("change", redraw);
    /* Another width or colour scheme, or the drawing library has come. */
    function redraw() {
      draw(false);
      var step = current();
      made.forEach(function (part) {
        if (part.resize) part.resize();
        if (part.step && step && state.kind === "run") part.step(step, phaseOf(step, state.beat), false);
      });
    }
    setNote("");
    render(false);
    if (!window.Plotly) {
      var tries = 0, wait = setInterval(function () {
        if (window.Plotly) { clearInterval(wait); redraw(); }
        else if (++tries > 300) { clearInterval(wait); setNote("The drawing library could not be loaded; reload the page.", "error"); }
      }, 100);
    }
    return { show: show, state: state, context: context, settled: function () { return busy; } };
  }

  /* One tree in a div of its own: same drawing, own size, no stubs opened.  Resolves when it is drawn. */
  function drawTree(div, step, phase, width, setup, scheme) {
    var sizes = scaled(setup.sizes, 1), beats = { draft: step.beats - AFTER - 1 };
    PHASES.slice(1).forEach(function (name, i) { beats[name] = step.beats - AFTER + i; });
    var all = step.n - 1 <= sizes.unfold_limit;
    var placed = place(step, function () { return all; }, sizes);
    var column = Math.max(sizes.column, Math.min(1.6 * sizes.column, (width - sizes.left - sizes.right) / step.maxDepth));
    width = Math.max(width, sizes.left + step.maxDepth * column + sizes.right);
    var traces = picture(step, beats[phase], { scheme: scheme, column: column, placed: placed, sizes: sizes }, setup);
    var layout = Object.assign({}, setup.layouts[scheme], { width: width, height: placed.height });
    layout.xaxis = Object.assign({}, layout.xaxis, { range: [0, width] });
    layout.yaxis = Object.assign({}, layout.yaxis, { range: [placed.height, 0] });
    var drawn = div.classList.contains("js-plotly-plot") ? window.Plotly.react(div, traces, layout, CONFIG) : window.Plotly.newPlot(div, traces, layout, CONFIG);
    return Promise.resolve(drawn).then(function () {
      div.querySelectorAll(".tracee2nodes .point").forEach(function (point) {
        var node = div.data[setup.nodesLayer].customdata[point.__data__.i];
        point.setAttribute("data-node", node);
        point.setAttribute("data-verdict", node === step.n ? step.next.kind : step.nodes[node].verdict);
      });
    });
  }

  window.Eagle2Player = {
    mount: mount,
    part: function (slot, make) { parts.push({ slot: slot, make: make }); },
    tools: {
      PHASES: PHASES, NAMES: NAMES, ORIGINS: ORIGINS, el: el, escape: escape, isolate: isolate, cutTo: cutTo, short: short, digits: digits,
      probability: probability, plural: plural, icon: icon, ICONS: ICONS, unpack: unpack, mixColor: mixColor, inkOn: inkOn, drawTree: drawTree,
    },
  };
})();
