/* Side views of the step shown: "Values and the cut" and "Rows of the target's pass: tree mask".
 *
 * Both draw what visual/views.py draws in Python, function by function; tests compare the two.  What is pointed at is marked by
 * one element laid over the figure, so that following the pointer costs no drawing.
 */
(function () {
  "use strict";

  var tools = window.Eagle2Player.tools, el = tools.el, escape = tools.escape, short = tools.short, plural = tools.plural;
  var PHASES = tools.PHASES, FLATTEN = PHASES.indexOf("flatten");

  function ordinal(number) {
    var teen = [11, 12, 13].indexOf(number % 100) >= 0;
    return number + (teen ? "th" : { 1: "st", 2: "nd", 3: "rd" }[number % 10] || "th");
  }

  /* ---- values ---- */

  function valuesInfo(step) {
    var marks = step.nodes.slice(1);
    marks.sort(function (a, b) {
      return b.logValue - a.logValue || (a.kept ? 0 : 1) - (b.kept ? 0 : 1) || a.depth - b.depth || a.node - b.node;
    });
    var kept = marks.filter(function (mark) { return mark.kept; }), cut = marks.filter(function (mark) { return !mark.kept; });
    return {
      marks: marks, kept: kept.length,
      lowestKept: kept.length ? kept[kept.length - 1].value : null, highestCut: cut.length ? cut[0].value : null,
      byValue: marks.slice(0, kept.length).every(function (mark) { return mark.kept; }),
    };
  }

  function drafted(info, phase, pass) {
    return phase === "draft" ? info.marks.filter(function (mark) { return mark.born <= pass; }) : info.marks;
  }

  function valuesLabel(info, phase, shown) {
    var count = info.marks.length;
    if (!count) return "";
    if (phase === "draft") return plural(shown, "value") + " so far";
    if (info.kept === count) return count === 1 ? "nothing is cut: 1 value, kept" : "nothing is cut: all " + count + " values kept";
    if (!info.kept) return "nothing is kept of " + plural(count, "value");
    if (!info.byValue) return info.kept + " of " + count + " kept, not by value";
    return "cut: the " + ordinal(info.kept) + " of " + count + " values, " + short(info.lowestKept);
  }

  function valuesWords(info, phase, pass, words) {
    var shown = drafted(info, phase, pass);
    if (!shown.length) return info.marks.length ? "No values yet." : words.nothing;
    var many = plural(shown.length, "drafted node");
    var ends = "highest " + short(shown[0].value) + ", lowest " + short(shown[shown.length - 1].value);
    if (phase === "draft") return "Values of the " + many + " so far, " + ends + ".";
    var said = "Values of " + many + ", " + ends + ", ";
    if (info.kept === shown.length) said += "all kept, nothing cut";
    else if (!info.byValue || info.lowestKept === null) said += info.kept + " kept";
    else said += "the " + info.kept + " highest kept, cut between " + short(info.lowestKept) + " and " + short(info.highestCut);
    if (phase === "accept") said += ", " + shown.filter(function (mark) { return mark.verdict === "accepted"; }).length + " accepted";
    return said + ".";
  }

  function valuesSpan(infos, sizes) {
    var most = 1, low = -1;
    infos.forEach(function (info) {
      var count = info.marks.length;
      most = Math.max(most, count);
      if (count) low = Math.min(low, Math.floor(Math.log10(Math.max(info.marks[count - 1].value, Math.pow(10, sizes.lowest_decade))) + 1e-4));
    });
    return [most, low];
  }

  function valuesAxes(most, low, sizes) {
    var ticks, x;
    if (most > sizes.crowd) {
      ticks = [1, 3, 10, 30, 100, 300, 1000, 3000, 10000].filter(function (n) { return n <= most; });
      x = { type: "log", range: [Math.log10(0.8), Math.log10(most * 1.15)] };
    } else {
      var step = [1, 2, 5, 10, 20].find(function (n) { return most <= 8 * n; });
      ticks = [1];
      for (var n = step; n <= most; n += step) if (n > 1) ticks.push(n);
      if (step > 1 && ticks.length > 1 && ticks[1] === 2) ticks.shift();
      x = { type: "linear", range: [0.2, most + 0.8] };
    }
    x.tickvals = ticks;
    x.ticktext = ticks.map(String);
    var powers = [];
    for (var power = 0; power <= -low; power += Math.max(1, Math.ceil(-low / 5))) powers.push(power);
    return {
      x: x,
      y: {
        range: [low - 0.15, 0.12],
        tickvals: powers.map(function (n) { return Math.pow(10, -n); }),
        ticktext: powers.map(function (n) { return n === 0 ? "1" : n <= 3 ? "." + "0".repeat(n - 1) + "1" : "1e-" + n; }),
      },
    };
  }

  function share(rank, axis) {
    return ((axis.type === "log" ? Math.log10(rank) : rank) - axis.range[0]) / (axis.range[1] - axis.range[0]);
  }

  function rankAt(share, axis) {
    var at = axis.range[0] + share * (axis.range[1] - axis.range[0]);
    return axis.type === "log" ? Math.pow(10, at) : at;
  }

  function valuesHover(mark, phase, rank, of) {
    var said = "<b>" + escape(tools.isolate(tools.cutTo(mark.token, 60))) + "</b><br>value " + tools.digits(mark.value) + ", " + ordinal(rank) + " of " + of;
    if (phase === "draft") return said + " so far";
    return said + "<br>" + (phase === "accept" ? mark.verdict : mark.kept ? "kept" : "cut");
  }

  function valuesFigure(info, phase, scheme, pass, span, width, setup) {
    var sizes = setup.views.sizes, palette = setup.palettes[scheme], base = setup.views.values[scheme];
    var late = PHASES.indexOf(phase), shown = drafted(info, phase, pass), axes = valuesAxes(span[0], span[1], sizes);
    var floor = Math.pow(10, span[1]), data = {}, at = {};
    base.traces.forEach(function (trace) { data[trace.name] = { x: [], y: [] }; });
    shown.forEach(function (mark, i) {
      var layer = late < 1 ? "drafted" : mark.kept ? "kept" : "cut", y = Math.max(mark.value, floor);
      if (phase === "accept" && mark.verdict === "accepted") layer = "accepted";
      var column = data[layer];
      column.x.push(i + 1);
      column.y.push(y);
      (column.customdata = column.customdata || []).push(mark.node);
      (column.hovertext = column.hovertext || []).push(valuesHover(mark, phase, i + 1, shown.length));
      if (layer === "accepted") {
        data.checks.x.push(i + 1);
        data.checks.y.push(y);
        (data.checks.text = data.checks.text || []).push("✓");
      }
      at[mark.node] = [i + 1, y];
    });
    var said = valuesLabel(info, phase, shown.length), line = 0, inner = width - sizes.left - sizes.right;
    var bottom = Math.pow(10, axes.y.range[0]), top = Math.pow(10, axes.y.range[1]), colors = [palette.dim];
    if (late >= 1 && info.byValue && info.kept > 0 && info.kept < info.marks.length) {
      data.line = { x: [info.kept + 0.5, info.kept + 0.5], y: [bottom, top] };
      line = share(info.kept + 0.5, axes.x);
    }
    if (said) {
      var left = Math.max(0, Math.min(sizes.left + line * inner, width - 4 - sizes.letter * said.length));
      var name = line * inner > sizes.letter * setup.views.words.axes.length ? 0 : line + 4 / inner;
      data.words = {
        x: [rankAt((left - sizes.left) / inner, axes.x), rankAt(name, axes.x)], y: [top, floor],
        text: [said, setup.views.words.axes], textposition: ["top right", "top right"],
      };
      colors.unshift(palette.ink);
    } else {
      data.words = {
        x: [rankAt(0.5, axes.x)], y: [Math.pow(10, (axes.y.range[0] + axes.y.range[1]) / 2)],
        text: [setup.views.words.nothing], textposition: ["middle center"],
      };
    }
    var layout = Object.assign({}, base.layout, { width: width });
    layout.xaxis = Object.assign({}, layout.xaxis, axes.x);
    layout.yaxis = Object.assign({}, layout.yaxis, axes.y);
    return {
      traces: base.traces.map(function (trace) {
        var made = Object.assign({}, trace, data[trace.name]);
        if (trace.name === "words") made.textfont = Object.assign({}, trace.textfont, { color: colors });
        if (trace.name === "cut" && span[0] > sizes.crowd) {
          made.mode = "lines";
          made.line = { color: palette.outline, width: 2, dash: "2px,2px" };
        }
        return made;
      }),
      layout: layout,
      /* Pixels of a node's mark in the figure, null where it has none. */
      pixel: function (node) {
        if (!(node in at)) return null;
        var high = axes.y.range, tall = layout.height - sizes.top - sizes.bottom;
        return [sizes.left + share(at[node][0], axes.x) * inner, sizes.top + (high[1] - Math.log10(at[node][1])) / (high[1] - high[0]) * tall];
      },
    };
  }

  /* ---- mask ---- */

  function maskInfo(step) {
    var path = { 0: true }, attends = [];
    step.accepted.forEach(function (node) { path[node] = true; });
    var rows = step.rows.map(function (node, row) {
      attends.push((node ? attends[step.rowOf[step.parents[node]]] : []).concat([row]));
      var entry = step.nodes[node];
      return {
        row: row, node: node, label: entry.label, position: step.position === null ? null : step.position + entry.depth,
        attends: attends[row], accepted: node in path,
      };
    });
    return { rows: rows, prefix: step.position, deepest: Math.max.apply(null, attends.map(function (list) { return list.length; })) - 1 };
  }

  function textSoFar(info) { return info.prefix === null ? "" : " (" + plural(info.prefix, "token") + ")"; }

  function maskWords(info, phase, words) {
    if (PHASES.indexOf(phase) < FLATTEN) return "Tree mask. " + words.no_rows;
    var kept = info.rows.length - 1, said = "Tree mask of " + plural(kept + 1, "row") + ": the root";
    said += (kept ? " and " + plural(kept, "kept node") : "") + ". Each row attends to the text so far" + textSoFar(info) + ", its ancestors and itself.";
    if (info.deepest) said += " The deepest row has " + plural(info.deepest, "ancestor") + ".";
    if (info.prefix !== null) said += info.deepest ? " Position ids " + info.prefix + " to " + (info.prefix + info.deepest) + "." : " Position id " + info.prefix + ".";
    if (phase === "accept") {
      var rows = info.rows.filter(function (row) { return row.accepted; }).map(function (row) { return row.row; }).slice(1);
      said += rows.length ? " Accepted: the root and row" + (rows.length === 1 ? " " : "s ") + rows.join(", ") + "." : " Accepted: the root.";
    }
    return said;
  }

  function maskFrame(rows, lastPosition, width, s) {
    var many = String(rows - 1).length, high = Math.max(s.least_high, Math.min(s.most_high, Math.floor(s.body / rows)));
    var chars = many + (lastPosition === null ? 0 : 2 + String(lastPosition).length);
    function room(labels) { return Math.floor((width - labels - s.prefix - 2) / rows); }
    var bare = s.check + s.cell * chars + s.gap, full = bare + s.cell * (s.token_cells + 1), withTokens = room(full) >= s.least_wide;
    var labels = withTokens ? full : bare, wide = Math.max(s.least_wide, Math.min(s.most_wide, room(labels)));
    var prefix = Math.ceil(labels), left = prefix + Math.max(s.prefix, Math.min(s.most_prefix, width - 2 - prefix - wide * rows));
    var font = Math.max(9, Math.min(11, high));
    return {
      width: Math.max(width, left + wide * rows + 2), height: s.head + high * rows + s.foot, wide: wide, high: high,
      withTokens: withTokens,
      prefix: prefix, left: left, everyRow: Math.ceil(font / high), font: font,
      everyColumn: [1, 2, 5, 10, 20, 50].find(function (n) { return n * wide >= 6 * many + 4; }),
    };
  }

  function maskHover(row, info) {
    var said = "<b>row " + row.row + " " + escape(row.label) + "</b>" + (row.position === null ? "" : " @" + row.position) + "<br>";
    return [said + "attends to the text so far"].concat(info.rows.map(function (other) {
      if (other === row) return said + "attends to itself";
      return said + (row.attends.indexOf(other.row) >= 0 ? "attends" : "does not attend") + " to row " + other.row + " " + escape(other.label);
    }));
  }

  function maskFigure(info, phase, scheme, width, setup) {
    var sizes = setup.views.sizes, palette = setup.palettes[scheme], templates = setup.views.mask[scheme].traces;
    var frame = maskFrame(info.rows.length, info.prefix === null ? null : info.prefix + info.deepest, width, sizes);
    var n = info.rows.length, right = frame.left + frame.wide * n, drawn = PHASES.indexOf(phase) >= FLATTEN, deciding = phase === "accept";
    var dot = Math.max(2, Math.round(Math.min(frame.wide, frame.high) * 0.3)), data = {};
    var blank = "\u00a0", digits = String(n - 1).length, last = info.prefix === null ? 0 : String(info.prefix + info.deepest).length;
    templates.forEach(function (trace) { data[trace.name] = { x: [], y: [] }; });
    function add(layer, values) {
      Object.keys(values).forEach(function (key) { (data[layer][key] = data[layer][key] || []).push(values[key]); });
    }
    if (drawn) {
      var ends = [frame.prefix], sides = [];
      for (var i = 0; i <= n; i++) { ends.push(frame.left + i * frame.wide); sides.push(sizes.head + i * frame.high); }
      data.cells = {
        x: ends, y: sides, xgap: frame.wide >= 7 ? 1 : 0, ygap: frame.high >= 7 ? 1 : 0, hovertext: info.rows.map(function (row) { return maskHover(row, info); }),
        z: info.rows.map(function (row) {
          var cells = new Array(n + 1).fill(0), shade = deciding && row.accepted ? 3 : 2;
          cells[0] = 1;
          row.attends.forEach(function (other) { cells[other + 1] = shade; });
          return cells;
        }),
      };
      info.rows.forEach(function (row) {
        var y = sizes.head + (row.row + 0.5) * frame.high, center = frame.left + (row.row + 0.5) * frame.wide, accepted = deciding && row.accepted;
        [[center - dot / 2, y], [center + dot / 2, y], [null, null]].forEach(function (end) { add("self", { x: end[0], y: end[1] }); });
        if (row.row % frame.everyColumn === 0) add("columns", { x: center, y: sizes.head - 8, text: String(row.row) });
        if (accepted) add("checks", { x: sizes.check / 2, y: y, text: "✓" });
        if (row.row % frame.everyRow) return;
        var label = [String(row.row).padStart(digits, blank)];
        if (row.position !== null) label.push(("@" + row.position).padEnd(1 + last, blank));
        if (frame.withTokens) label.push(escape(row.label));
        add("labels", { x: sizes.check, y: y, text: label.join(blank), color: accepted ? palette.accepted : palette.ink });
      });
      add("words", { x: frame.prefix - 2, y: sizes.head - 22, text: "text so far" + textSoFar(info), size: 10 });
    } else {
      add("words", { x: frame.width / 2, y: (sizes.head + frame.height - sizes.foot) / 2, text: setup.views.words.no_rows, size: 12, textposition: "middle center" });
    }
    var layout = Object.assign({}, setup.layouts[scheme], { width: frame.width, height: frame.height });
    layout.xaxis = Object.assign({}, layout.xaxis, { range: [0, frame.width] });
    layout.yaxis = Object.assign({}, layout.yaxis, { range: [frame.height, 0] });
    layout.shapes = [{
      type: "rect", x0: drawn ? frame.prefix : 1, x1: drawn ? right : frame.width - 1, y0: sizes.head, y1: frame.height - sizes.foot, layer: "below",
      line: drawn ? { color: palette.rule, width: 1 } : { color: palette.edge, width: 1, dash: "4px,3px" },
    }];
    return {
      frame: frame, layout: layout, drawn: drawn,
      traces: templates.map(function (base) {
        var columns = data[base.name], trace = Object.assign({}, base, columns);
        delete trace.color;
        delete trace.size;
        if (base.name === "self") trace.line = Object.assign({}, base.line, { width: dot });
        else if (base.name === "labels" || base.name === "words") {
          trace.textfont = Object.assign({}, base.textfont, { size: columns.size ? columns.size[0] : frame.font - 1 }, columns.color ? { color: columns.color } : {});
        }
        return trace;
      }),
    };
  }

  Object.assign(tools, { valuesInfo: valuesInfo, ordinal: ordinal }); // for why.js

  /* ---- the part ---- */

  window.Eagle2Player.part("side", function (context) {
    var setup = context.setup, sizes = setup.views.sizes, words = setup.views.words;
    var timer = 0, infos = new WeakMap(), span = [1, -1], mostRows = 1, values = view("values", "Values and the cut"), mask = view("mask", "Rows of the target's pass: tree mask");
    var ring = el("span", { class: "e2-ring", "data-testid": "values-ring", hidden: true, "aria-hidden": "true" });
    var bandName = el("span", { class: "e2-bandname" });
    var band = el("span", { class: "e2-band", "data-testid": "mask-band", hidden: true, "aria-hidden": "true" }, bandName);
    values.box.append(ring);
    mask.box.append(band);
    mask.box.addEventListener("mousemove", function (event) { point(rowAt(event)); });
    mask.box.addEventListener("mouseleave", function () { point(null); });
    mask.box.addEventListener("click", function (event) { pin(rowAt(event)); });
    mask.box.addEventListener("keydown", function (event) { // where it scrolls, the arrows do that and not change the phase
      if (/^Arrow(Left|Right)$/.test(event.key) && mask.box.scrollWidth > mask.box.clientWidth) event.stopPropagation();
    });
    context.saveable("values", "Values and cut", values.div);
    context.saveable("mask", "Tree mask", mask.div);

    function key(kind, text, after) { return [el("span", { class: "e2-nobreak" }, el("span", { class: "e2-key " + kind, "aria-hidden": "true" }), text), after]; }
    function view(name, title) {
      var made = { div: el("div", { "data-testid": name, role: "img", "aria-label": title }), drawn: null, step: null, at: "" };
      made.box = el("div", { class: "e2-viewbox", "data-testid": name + "-box" }, made.div);
      made.caption = el("span", {});
      made.root = el("figure", { class: "e2-view" }, el("figcaption", {}, el("b", { text: title }), made.caption), made.box);
      return made;
    }
    values.caption.append.apply(values.caption, [].concat(
      "Each mark is a drafted node; its value is the product of the confidences on its path. ",
      key("e2-key-grey", "drafted,", " "), key("e2-key-full", "kept,", " "), key("e2-key-cut", "cut,", " "), el("span", { class: "e2-nobreak", text: "✓ accepted." })));
    mask.caption.append.apply(mask.caption, [].concat(
      "Row, @position id, token. Filled where a row attends: ", key("e2-key-text", "text so far,", " "), key("e2-key-cell", "ancestors,", " "),
      key("e2-key-self", "itself.", " "), el("span", { class: "e2-nobreak", text: "✓ accepted path." })));
    values.box.style.minHeight = sizes.values_height + "px";

    function infoOf(step) {
      if (!infos.has(step)) infos.set(step, { values: valuesInfo(step), mask: maskInfo(step) });
      return infos.get(step);
    }

    var pointed = null;
    function point(node) {
      var what = node === null ? null : { step: context.step().number, node: node }, now = what && what.step + ":" + node;
      if (now === pointed) return;
      pointed = now;
      context.link(what);
    }
    function pin(node) {
      if (node === null) return;
      var step = context.step(), now = context.state.pin, same = now && now.step === step.number && now.node === node;
      context.stop();
      context.link(same ? null : { step: step.number, node: node }, true); // a second click lets go
    }
    function rowAt(event) {
      var step = context.step(), figure = mask.drawn;
      if (!step || mask.step !== step || !figure.drawn) return null;
      var row = Math.floor((event.clientY - mask.box.getBoundingClientRect().top - sizes.head) / figure.frame.high);
      mask.box.classList.toggle("e2-over", row >= 0 && row < step.rows.length);
      return row >= 0 && row < step.rows.length ? step.rows[row] : null;
    }

    /* Draws unless the same is drawn already; a view that is not on screen (no width) is left for later. */
    function draw(view, step, at, make, said) {
      if (view.at === at) return;
      var figure = make(), first = !view.div.classList.contains("js-plotly-plot");
      view.at = at;
      view.drawn = figure;
      view.step = step;
      view.div.setAttribute("aria-label", said);
      context.plot(view.div, figure.traces, figure.layout);
      if (first && view === values && view.div.on) {
        view.div.on("plotly_hover", function (event) { view.div.classList.add("e2-over"); point(event.points[0].customdata); });
        view.div.on("plotly_unhover", function () { view.div.classList.remove("e2-over"); point(null); });
        view.div.on("plotly_click", function (event) { pin(event.points[0].customdata); });
      }
      var scrolls = figure.layout.width > view.box.clientWidth + 1;
      if (scrolls) { view.box.setAttribute("tabindex", "0"); view.box.setAttribute("role", "region"); view.box.setAttribute("aria-label", said.split(".")[0]); }
      else ["tabindex", "role", "aria-label"].forEach(function (name) { view.box.removeAttribute(name); });
    }

    /* The tree is drawn first, then these, each in a task of its own; who scrubs on gets only the last step's. */
    function show(step, phase) {
      clearTimeout(timer);
      mark(context.state.link || context.state.pin);
      if (!window.Plotly || values.box.clientWidth < 100) return;
      timer = setTimeout(function () {
        if (!showValues(step, phase)) return;
        timer = setTimeout(function () { if (showMask(step, phase)) mark(context.state.link || context.state.pin); }, 0);
      }, 0);
    }
    function sameAs(step, width) { return [runs, step.number, context.scheme(), width].join(); }
    function showValues(step, phase) {
      var width = values.box.clientWidth, scheme = context.scheme(), pass = context.state.beat, info = infoOf(step).values;
      if (context.step() !== step || width < 100) return false;
      draw(values, step, [sameAs(step, width), phase === "draft" ? "draft" + pass : phase === "accept" ? phase : "rerank"].join(), function () {
        return valuesFigure(info, phase, scheme, pass, span, width, setup);
      }, valuesWords(info, phase, pass, words));
      values.div.dataset.drawn = step.number + ":" + phase;
      return true;
    }
    function showMask(step, phase) {
      var width = mask.box.clientWidth, scheme = context.scheme(), late = PHASES.indexOf(phase), info = infoOf(step).mask;
      if (context.step() !== step || width < 100) return false;
      mask.box.style.minHeight = maskFrame(mostRows, null, width, sizes).height + "px";
      draw(mask, step, [sameAs(step, width), late < FLATTEN ? "empty" : phase === "accept" ? phase : "flatten"].join(), function () {
        return maskFigure(info, phase, scheme, width, setup);
      }, maskWords(info, phase, words));
      mask.div.dataset.drawn = step.number + ":" + phase;
      return true;
    }

    /* The ring and the band: moved, never drawn. */
    function mark(link) {
      var step = context.step(), node = link && step && link.step === step.number ? link.node : null;
      var pixel = node === null || values.step !== step ? null : values.drawn.pixel(node);
      ring.hidden = !pixel;
      if (pixel) {
        ring.dataset.node = node;
        ring.style.left = pixel[0] + "px";
        ring.style.top = pixel[1] + "px";
      }
      var row = node !== null && mask.step === step && mask.drawn.drawn && node in step.rowOf ? step.rowOf[node] : null;
      band.hidden = row === null;
      if (row === null) return;
      var frame = mask.drawn.frame, entry = infoOf(step).mask.rows[row];
      band.dataset.node = node;
      band.style.left = "0";
      band.style.width = frame.left + frame.wide * step.rows.length + 1 + "px";
      band.style.top = sizes.head + row * frame.high - 1 + "px";
      band.style.height = frame.high + 2 + "px";
      // Its own label where the figure had no room for it.
      bandName.hidden = frame.withTokens && row % frame.everyRow === 0;
      bandName.textContent = row + " " + entry.label + (entry.position === null ? "" : " @" + entry.position);
      band.classList.toggle("e2-band-low", row < 2);
    }

    var runs = 0;
    return {
      root: el("div", { class: "e2-views" }, values.root, mask.root),
      run: function () {
        runs++;
        infos = new WeakMap();
        pointed = null;
        var steps = context.state.steps;
        span = valuesSpan(steps.map(function (step) { return infoOf(step).values; }), sizes);
        values.caption.querySelector(".e2-key-cut").classList.toggle("e2-key-dots", span[0] > sizes.crowd);
        mostRows = steps.reduce(function (most, step) { return Math.max(most, step.rows.length); }, 1);
      },
      step: show,
      link: mark, // after a resize the player calls `step`, which sees the new width
    };
  });
})();
