/* "Static against dynamic": the two trees of one context, side by side.
 *
 * Eagle2Compare.mount(host, setup) returns {show(message)}; the message is visual/compare.py's: pairs of runs, the contexts
 * that both share, and what is said of them.  All numbers in words come from there.  Text of tokens and prompts is
 * hostile: textContent only.
 */
(function () {
  "use strict";

  var PHASES = ["rerank", "verify", "accept"];
  var SIDES = ["static", "dynamic"]; // left to right
  var NUMBER = "Beside a token: ";
  var serial = 0;

  function mount(host, setup) {
    var tools = window.Eagle2Player.tools, el = tools.el, words = setup.compare;
    var id = "e2-compare-" + ++serial;
    var state = { message: null, pair: 0, context: 0, phase: "accept" };
    var steps = {}; // unpacked steps of the pair that is shown
    var frame = 0, lastWidth = 0, token = 0, cells = null, moved = false;
    var systemDark = window.matchMedia("(prefers-color-scheme: dark)");

    var choice = el("div", { class: "e2-phases", role: "group", "aria-label": "Pair of runs" });
    var look = el("p", { class: "e2-compare-look", "data-testid": "compare-look" });
    var note = el("p", { class: "e2-empty", "data-testid": "compare-note", role: "status" });
    var prompt = el("dd", { dir: "auto", "data-testid": "compare-prompt" });
    var output = el("dd", { dir: "auto", "data-testid": "compare-output" });
    var context = el("div", { class: "e2-compare-context", tabindex: "0", role: "region", "aria-label": "The context: prompt and output so far", "data-testid": "compare-context" },
      el("dl", {}, el("div", {}, el("dt", { text: "Prompt" }), prompt), el("div", {}, el("dt", { text: "Output so far, the root marked" }), output)));

    function step(name, path, by, testid) {
      return el("button", { type: "button", class: "e2-button", "aria-label": name, title: name, "data-testid": testid, onclick: function () { go(state.context + by); } }, tools.icon(path));
    }
    var previous = step("Previous shared context", tools.ICONS.previous, -1, "compare-previous");
    var next = step("Next shared context", tools.ICONS.next, 1, "compare-next");
    var slider = el("input", { type: "range", min: 1, max: 1, value: 1, step: 1, "aria-label": "Shared context", "data-testid": "compare-slider", oninput: function () { go(+slider.value - 1); } });
    var place = el("span", { class: "e2-compare-place", "data-testid": "compare-place" });
    var moves = el("div", { class: "e2-compare-moves" }, previous, slider, next, place);
    var chips = {}, phases = el("div", { class: "e2-phases", role: "group", "aria-label": "Phase" });
    PHASES.forEach(function (phase) {
      chips[phase] = el("button", { type: "button", class: "e2-chip", "data-testid": "compare-phase-" + phase, text: tools.NAMES[phase], onclick: function () { state.phase = phase; moved = true; render(); } });
      phases.append(chips[phase]);
    });
    var sentence = el("p", { class: "e2-compare-said", "data-testid": "compare-sentence", "aria-live": "polite" });

    var sides = {};
    SIDES.forEach(function (name) {
      var side = sides[name] = {};
      side.plot = el("div", { class: "e2-compare-plot" });
      side.scroll = el("div", { class: "e2-compare-scroll", tabindex: "0", role: "region", "aria-label": words[name] + ", drawing" }, side.plot);
      side.said = el("p", { class: "e2-compare-line", "data-testid": "compare-" + name + "-line" });
      side.table = el("table", { class: "e2-table", "data-testid": "compare-" + name + "-table" });
      side.tablebox = el("div", { class: "e2-tablebox", tabindex: "0", role: "region", "aria-label": words[name] + ", table" }, side.table);
      side.details = el("details", { class: "e2-details", ontoggle: function () { fillTable(name); } }, el("summary", { text: "This tree as a table" }), side.tablebox);
      side.root = el("figure", { class: "e2-compare-side", "data-testid": "compare-" + name },
        el("figcaption", { text: words[name] }), side.scroll, el("div", {}, side.said, side.details));
    });
    // Layers stand at the same places in both, and stay so while one is scrolled.
    SIDES.forEach(function (name, i) {
      var other = sides[SIDES[1 - i]].scroll;
      sides[name].scroll.addEventListener("scroll", function () { if (other.scrollLeft !== this.scrollLeft) other.scrollLeft = this.scrollLeft; });
    });
    var legendNumber = el("li", { "data-testid": "compare-number" }), legendRing = el("li", {});
    var legend = makeLegend();
    var totals = el("table", { class: "e2-table e2-compare-table", "data-testid": "compare-totals" });
    var totalsBox = el("div", { class: "e2-tablebox", tabindex: "0", role: "region", "aria-label": "Totals of both runs" }, totals);
    var shared = el("div", { class: "e2-compare-shared" }, context, el("div", { class: "e2-compare-bar" }, moves, phases), sentence,
      el("div", { class: "e2-compare-sides" }, sides.static.root, sides.dynamic.root), legend);
    var body = el("div", {}, choice, look, el("p", { class: "e2-compare-about", text: words.about }), shared);
    var root = el("section", { class: "e2 e2-compare", id: id, "aria-label": "Static against dynamic", "data-testid": "compare" }, body, note, totalsBox);
    host.replaceChildren(root);

    function makeLegend() {
      var open = '<svg viewBox="0 0 34 16" aria-hidden="true">';
      function item(svg, text) {
        var box = el("span", { class: "e2-swatch" });
        box.innerHTML = open + svg + "</svg>"; // constant drawings below, no data
        return el("li", {}, box, text);
      }
      legendRing.append(item('<circle class="f-value" cx="17" cy="8" r="5"/><circle class="k-ring" cx="17" cy="8" r="7.2"/>', "").firstChild, "ring: the target's first choice");
      return el("ul", { class: "e2-legend", "aria-label": "Legend of both trees" },
        item('<path class="k-accepted" d="M1 8h22"/><circle class="f-accepted" cx="25" cy="8" r="7"/><path class="k-check" d="M21.5 8.2l2.4 2.6 4.4-5"/>', "accepted"),
        item('<path class="k-own" d="M1 8h18"/><path class="f-own" d="M26 1l2.1 4.6 5 .5-3.8 3.3 1.1 4.9-4.4-2.6-4.4 2.6 1.1-4.9-3.8-3.3 5-.5z"/>', "the target's own token"),
        item('<path class="k-edge" d="M1 8h18"/><circle class="f-rejected" cx="25" cy="8" r="7"/><path class="k-cross" d="M22.2 5.2l5.6 5.6m0-5.6l-5.6 5.6"/>', "rejected"),
        item('<path class="k-cut" d="M1 8h18"/><circle class="f-cut" cx="24" cy="8" r="3.5"/>', "cut by the reranking phase (+n: so many, not drawn)"),
        legendRing, el("li", {}, el("span", { class: "e2-ramp" }), "value, low to high (log)"),
        el("li", { text: "On an edge: the head's confidence." }), legendNumber);
    }

    function dark() {
      if (document.body.classList.contains("dark") || document.documentElement.classList.contains("dark")) return true;
      return Boolean(setup.standalone) && systemDark.matches;
    }
    function scheme() { return dark() ? "dark" : "light"; }
    function pair() { return state.message && state.message.pairs[state.pair]; }
    function here() { return pair() && pair().contexts[state.context]; }

    /* A step of the pair that is shown; unpacked when it is first looked at. */
    function stepOf(side, number) {
      var key = side + number;
      if (!steps[key]) {
        var run = pair()[side], position = run.first_position;
        for (var i = 0; i < number; i++) position += run.steps[i].e;
        steps[key] = tools.unpack(run.steps[number], run.tokens, number);
        steps[key].position = position;
      }
      return steps[key];
    }

    /* ---- choosing ---- */

    function open(number) {
      state.pair = number;
      state.context = 0;
      steps = {};
      SIDES.forEach(function (name) { sides[name].scroll.scrollLeft = 0; });
      if (pair()) fillTotals(pair());
      render();
    }
    function go(number) {
      var last = pair().contexts.length - 1, to = Math.max(0, Math.min(last, number));
      if (to === state.context) return;
      state.context = to;
      moved = true;
      render();
    }

    /* ---- drawing ---- */

    function render() {
      var now = pair(), at = here();
      body.hidden = totalsBox.hidden = !now;
      note.hidden = Boolean(at);
      shared.hidden = !at;
      note.textContent = now ? words.apart : words.empty;
      if (!now) return;
      Array.prototype.forEach.call(choice.children, function (button, i) { button.setAttribute("aria-pressed", String(i === state.pair)); });
      look.textContent = now.look ? "What to look at: " + now.look : "";
      look.hidden = !now.look;
      root.dataset.pair = state.pair;
      root.dataset.context = at ? state.context : "";
      root.dataset.phase = state.phase;
      if (!at) return;
      prompt.textContent = now.prompt;
      var pieces = now.dynamic.lanes.eagle2.pieces.slice(0, at.position), rootPiece = pieces.pop();
      output.replaceChildren(pieces.join(""), el("span", { class: "e2-compare-root", title: "the root token of both trees", text: rootPiece }));
      context.scrollTop = context.scrollHeight;
      var many = now.contexts.length;
      moves.hidden = many < 2;
      slider.max = many;
      slider.value = state.context + 1;
      // Not `disabled`, which would take the focus away.
      previous.setAttribute("aria-disabled", String(state.context === 0));
      next.setAttribute("aria-disabled", String(state.context === many - 1));
      place.textContent = "Context " + (state.context + 1) + " of " + many;
      slider.setAttribute("aria-valuetext", place.textContent + ", " + tools.plural(at.position, "output token") + " so far");
      PHASES.forEach(function (phase) { chips[phase].setAttribute("aria-pressed", String(phase === state.phase)); });
      sentence.textContent = at.say;
      SIDES.forEach(function (name) {
        sides[name].said.textContent = at[name].say;
        if (sides[name].details.open) fillTable(name);
      });
      legendNumber.textContent = NUMBER + (state.phase === "rerank" ? "its value." : "the target's probability.");
      legendRing.hidden = state.phase !== "verify";
      draw();
    }

    /* Once per frame at most, and not while the page hides it: then the resize observer comes back. */
    function draw() {
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(drawNow);
    }
    function drawNow() {
      var at = here();
      if (!sides.static.scroll.clientWidth) lastWidth = 0; // so that any width is a new one
      if (!at || !window.Plotly || !sides.static.scroll.clientWidth) return;
      var now = scheme(), mine = ++token, both = SIDES.map(function (name) { return stepOf(name, at[name].step); });
      root.dataset.scheme = now;
      lastWidth = sides.static.scroll.clientWidth;
      var depth = Math.max(both[0].maxDepth, both[1].maxDepth), sized = fitted(both);
      Promise.all(SIDES.map(function (name, i) {
        // Both as wide as the deeper one, so that a layer stands at the same place in both.
        return tools.drawTree(sides[name].plot, Object.assign({}, both[i], { maxDepth: depth }), state.phase, sides[name].scroll.clientWidth, sized, now);
      })).then(function () {
        if (mine !== token) return;
        if (moved) follow(both);
        moved = false;
        root.dataset.drawn = [state.pair, state.context, state.phase, now].join(":");
      });
    }

    /* On a narrow screen: brings the ends of both paths into sight, else the roots. */
    function follow(both) {
      var left = 0;
      if (state.phase === "accept") SIDES.forEach(function (name, i) {
        var nodes = sides[name].plot.data[setup.nodesLayer], own = nodes.x[nodes.customdata.indexOf(both[i].n)];
        left = Math.max(left, own + setup.sizes.right - sides[name].scroll.clientWidth);
      });
      sides.static.scroll.scrollLeft = sides.dynamic.scroll.scrollLeft = left;
    }

    /* Columns as narrow as the longest label of both trees lets them be: there is half the page for each tree. */
    function fitted(both) {
      var sizes = setup.sizes, widest = 0;
      cells = cells || document.createElement("canvas").getContext("2d");
      cells.font = sizes.label_font + "px " + getComputedStyle(root).getPropertyValue("--e2-mono");
      both.forEach(function (step) {
        step.nodes.forEach(function (node) { if (node.kept) widest = Math.max(widest, cells.measureText(node.label).width); });
        widest = Math.max(widest, 1.1 * cells.measureText(step.next.label).width); // it is drawn bold
      });
      // Beside the label stand two numbers of up to five characters: the node's own and the next node's confidence.
      var column = Math.min(sizes.column, Math.ceil(widest) + 86), right = Math.min(sizes.right, Math.ceil(widest) + 46);
      return Object.assign({}, setup, { sizes: Object.assign({}, sizes, { column: column, right: right }) });
    }

    /* ---- tables ---- */

    function row(kind, cells, mono) {
      var out = el("tr", {});
      cells.forEach(function (cell, i) {
        var head = kind === "th" || (kind === "row" && i === 0);
        out.append(el(head ? "th" : "td", { text: String(cell), scope: head ? (kind === "th" ? "col" : "row") : null, class: mono && mono.indexOf(i) >= 0 ? "e2-mono" : null }));
      });
      return out;
    }

    function fillTable(name) {
      var side = sides[name], at = here();
      if (!side.details.open || !at) return;
      var step = stepOf(name, at[name].step), rows = el("tbody", {});
      step.raw.k.forEach(function (index) {
        var node = step.nodes[index];
        var line = row("td", [node.depth, node.token, step.nodes[node.parent].token, tools.probability(node.confidence), tools.digits(node.value), tools.probability(node.prob), node.verdict], [1, 2]);
        line.dataset.node = index;
        line.dataset.verdict = node.verdict;
        rows.append(line);
      });
      side.table.replaceChildren(el("caption", { text: words[name] + ": the nodes for the target in row order" }),
        el("thead", {}, row("th", ["layer", "token", "after", "confidence", "value", "target probability", "verdict"])), rows);
    }

    function fillTotals(now) {
      var rows = el("tbody", {});
      now.rows.forEach(function (cells) { rows.append(row("row", cells)); });
      totals.replaceChildren(el("caption", { text: caption(now) }), el("thead", {}, row("th", ["both whole runs", "static tree", "dynamic tree"])), rows);
    }

    /* What the totals are and how they were made: what both runs have in common once, the rest for each. */
    function caption(now) {
      var other = {};
      now.dynamic.about.forEach(function (fact) { other[fact[0]] = fact[1]; });
      var said = now.static.about.filter(function (fact) { return ["model", "draft head", "dtype", "device", "tree", "decoding", "recorded"].indexOf(fact[0]) >= 0; }).map(function (fact) {
        var ours = fact[1], theirs = other[fact[0]] || "";
        if (fact[0] === "recorded") { ours = ours.slice(0, 10); theirs = theirs.slice(0, 10); }
        return fact[0] + " " + (ours === theirs ? ours : ours + " (static) and " + theirs + " (dynamic)");
      });
      return "Totals over both whole runs, counted in the recordings: " + said.join("; ") + ".";
    }

    /* ---- messages, size, colours ---- */

    function show(message) {
      if (!message || message.kind !== "compare") return;
      state.message = message;
      choice.replaceChildren();
      message.pairs.forEach(function (item, i) {
        choice.append(el("button", { type: "button", class: "e2-chip", dir: "auto", "data-testid": "compare-pair-" + i, text: item.title, onclick: function () { if (state.pair !== i) open(i); } }));
      });
      open(Math.max(0, Math.min(message.pairs.length - 1, message.opened || 0)));
    }

    new ResizeObserver(function () { if (Math.abs(sides.static.scroll.clientWidth - lastWidth) >= 1) draw(); }).observe(root);
    new MutationObserver(function () { if (scheme() !== root.dataset.scheme) draw(); }).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    systemDark.addEventListener("change", draw);
    render();
    if (!window.Plotly) {
      var tries = 0, wait = setInterval(function () {
        if (window.Plotly || ++tries > 300) { clearInterval(wait); draw(); }
      }, 100);
    }
    return { show: show, state: state };
  }

  window.Eagle2Compare = { mount: mount };
})();
