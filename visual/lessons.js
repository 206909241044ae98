/* For learners: terms that explain themselves, the guided tour, the prediction game.  The texts come from visual/lessons.py.
 * Tokens appear in the tour and in the game: textContent only.
 */
(function () {
  "use strict";

  var tools = window.Eagle2Player.tools, el = tools.el, isolate = tools.isolate, digits = tools.digits;
  var lessonsOf = new WeakMap(); // context -> what `make` built, for the part in another slot
  var serial = 0;

  function count(number, noun) {
    return number + " " + noun + (number === 1 ? "" : /s$/.test(noun) ? "es" : "s");
  }

  /* Tokens of a node's path, the root left out. */
  function pathTo(step, node) {
    var path = [];
    for (var i = node; i > 0; i = step.parents[i]) path.unshift(i);
    return path;
  }

  function pathText(step, path) {
    return path.map(function (node) { return isolate(step.nodes[node].label); }).join(" → ");
  }

  /* ---- terms ---- */

  // Fixed words only: nothing in these comes from a trace or changes while the run plays.
  var FIXED = ".e2-figure dt, .e2-legend li:not(.e2-meaning), .e2-lane header :is(h2, h3, h4), figcaption, caption, thead th";
  var NEVER = "button, a, summary, select, output, tbody, svg, bdi, code, [aria-live], [role=status], [role=tooltip], [role=dialog]," +
    " [data-testid^=text-], [data-testid=node-table], .e2-token, .e2-mono, .js-plotly-plot, .e2-volatile";

  function makeTerms(context, id) {
    var root = context.root, entries = context.setup.lessons.glossary, byForm = {}, forms = [];
    entries.forEach(function (entry) {
      entry.forms.forEach(function (form) { byForm[form.toLowerCase()] = entry; forms.push(form); });
    });
    forms.sort(function (a, b) { return b.length - a.length; }); // "draft head" before "head"
    var pattern = "(^|[^\\w-])(" + forms.map(function (form) { return form.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"); }).join("|") + ")(?![\\w-])";
    var owner = null, leaving = 0;
    var name = el("strong", {}), text = el("span", {}), source = el("span", { class: "e2-tip-source" });
    var tip = el("div", { class: "e2-tip", role: "tooltip", id: id + "-tip", "data-testid": "tip", hidden: true }, name, text, source);
    root.append(tip);

    function button(entry, words) {
      return el("button", { type: "button", class: "e2-term", "data-term": entry.term, text: words });
    }

    /* Makes the first occurrence of each term in an element a button; the words stay the same. */
    function wrap(element) {
      var used = {}, texts = [], walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
      while (walker.nextNode()) texts.push(walker.currentNode);
      texts.forEach(function (node) {
        if (node.parentNode.closest(NEVER)) return;
        var find = new RegExp(pattern, "gi"), words = node.data, from = 0, match, box = el("span", {});
        while ((match = find.exec(words))) {
          var entry = byForm[match[2].toLowerCase()], at = match.index + match[1].length;
          find.lastIndex = at + match[2].length;
          if (used[entry.term]) continue;
          used[entry.term] = true;
          var term = button(entry, match[2]);
          if (element.closest("[title]")) term.title = ""; // else the browser's own tip covers ours
          box.append(words.slice(from, at), term);
          from = find.lastIndex;
        }
        if (!from) return;
        box.append(words.slice(from));
        node.replaceWith(box); // one box: the parts of a flex item must not become items of their own
      });
    }

    function wrapAll() {
      root.querySelectorAll(FIXED).forEach(function (element) {
        if (element.querySelector(".e2-term") || element.closest(NEVER)) return;
        wrap(element);
      });
    }
    // A table may be filled only when its box is opened; `toggle` does not bubble.
    root.addEventListener("toggle", function () { setTimeout(wrapAll, 0); }, true);

    function show(term) {
      clearTimeout(leaving);
      if (owner === term) return;
      hide();
      var entry = entries.find(function (one) { return one.term === term.dataset.term; });
      name.textContent = entry.term;
      text.textContent = entry.text;
      source.textContent = entry.source;
      source.hidden = !entry.source;
      owner = term;
      term.setAttribute("aria-describedby", tip.id);
      tip.hidden = false;
      place();
    }
    function hide() {
      clearTimeout(leaving);
      if (!owner) return;
      owner.removeAttribute("aria-describedby");
      owner = null;
      tip.hidden = true;
    }
    function leave() {
      clearTimeout(leaving);
      leaving = setTimeout(hide, 200); // time to move the pointer into the tip
    }
    /* Above the term, or below it where there is no room; inside the window in any case. */
    function place() {
      if (!owner) return;
      if (!owner.isConnected || !owner.getClientRects().length) { hide(); return; }
      var box = owner.getClientRects()[0], width = document.documentElement.clientWidth, height = window.innerHeight;
      if (box.bottom < 0 || box.top > height) { hide(); return; }
      var left = Math.max(8, Math.min(width - 8 - tip.offsetWidth, box.left + box.width / 2 - tip.offsetWidth / 2));
      var top = box.top - tip.offsetHeight - 6;
      if (top < 8) top = Math.max(8, Math.min(height - 8 - tip.offsetHeight, box.bottom + 6));
      tip.style.left = left + "px";
      tip.style.top = top + "px";
    }

    function termAt(event) { return event.target.closest ? event.target.closest(".e2-term") : null; }
    root.addEventListener("mouseover", function (event) {
      var term = termAt(event);
      if (term) show(term);
      else if (tip.contains(event.target)) clearTimeout(leaving);
    });
    root.addEventListener("mouseout", function (event) {
      if ((termAt(event) || tip.contains(event.target)) && document.activeElement !== owner) leave();
    });
    root.addEventListener("focusin", function (event) { if (termAt(event)) show(termAt(event)); });
    root.addEventListener("focusout", function (event) { if (termAt(event) === owner) hide(); });
    root.addEventListener("click", function (event) { if (termAt(event)) show(termAt(event)); });
    document.addEventListener("pointerdown", function (event) {
      if (owner && !owner.contains(event.target) && !tip.contains(event.target)) hide();
    });
    document.addEventListener("keydown", function (event) {
      if (event.key !== "Escape" || !owner) return;
      hide();
      event.stopImmediatePropagation(); // the tour goes on
    }, true);
    window.addEventListener("scroll", place, { capture: true, passive: true });
    window.addEventListener("resize", place);

    /* The terms of a phase, under its sentence: that one is read aloud as a whole, so it stays free of buttons. */
    var line = el("p", { class: "e2-terms", "data-testid": "terms" }), lists = {}, shown = "";
    Object.keys(context.setup.lessons.phases).forEach(function (phase) {
      var list = el("span", { hidden: true }, "Terms here: ");
      context.setup.lessons.phases[phase].forEach(function (term, i) { list.append(i ? ", " : "", button(byForm[term], term)); });
      lists[phase] = list;
      line.append(list);
    });
    function step(phase) {
      if (phase === shown) return;
      var focused = line.contains(document.activeElement);
      if (shown) lists[shown].hidden = true;
      lists[phase].hidden = false;
      shown = phase;
      if (focused) root.querySelector("[data-testid=player]").focus({ preventScroll: true });
    }

    var list = el("dl", { class: "e2-glossary-list" });
    entries.forEach(function (entry) {
      var from = entry.source ? el("dd", { class: "e2-tip-source" }, el("a", { href: entry.url, target: "_blank", rel: "noopener", text: entry.source })) : null;
      list.append(el("div", {}, el("dt", { text: entry.term }), el("dd", { text: entry.text }), from));
    });
    var glossary = el("details", { class: "e2-glossary", "data-testid": "glossary" }, el("summary", { text: "Glossary: " + count(entries.length, "term") }), list);

    return { wrapAll: wrapAll, line: line, step: step, glossary: glossary, hide: hide };
  }

  /* ---- the tour ---- */

  /* Steps that the tour shows. */
  function steps(run, all) {
    function best(candidates, score) {
      return candidates.reduce(function (a, b) { return score(b) > score(a) ? b : a; });
    }
    function some(wish) { var found = all.filter(wish); return found.length ? found : all; }
    return {
      end: all.length - 1,
      richest: best(some(function (step) { return step.n - 1 > step.raw.k.length; }), function (step) { return step.accepted.length; }).number,
      loss: best(some(function (step) { return step.raw.k.length > 0; }), function (step) { return -step.accepted.length; }).number,
    };
  }

  /* The placeholders of visual.lessons: FIELDS, and FLAGS as true or false; null has no value here. */
  function facts(context, shown) {
    var run = context.state.run, step = context.step(), raw = step.raw, about = {}, kept = raw.k, cut = [];
    run.about.forEach(function (pair) { about[pair[0]] = pair[1]; });
    for (var i = 1; i < step.n; i++) if (!step.nodes[i].kept) cut.push(i);
    function value(node) { return step.nodes[node].value; }
    function extreme(nodes, pick) { return nodes.length ? digits(pick.apply(null, nodes.map(value))) : null; }
    var deep = kept.filter(function (node) { return step.nodes[node].depth > 1; });
    var example = deep.length ? pathTo(step, deep.reduce(function (a, b) { return value(b) > value(a) ? b : a; })) : null;
    var other = run.lanes.autoregressive, plain = other && other.times.length > 1 ? other.times.length - 1 : null;
    var drafted = step.n - 1, passes = step.passes, fixed = /^static/.test(about.tree || ""), greedy = about.decoding === "greedy";
    var depths = kept.map(function (node) { return step.nodes[node].depth; });
    return {
      accepted: step.accepted.length, clock: run.clock, cut: cut.length || null, drafted: drafted || null,
      fed: passes.length > 1 ? passes[passes.length - 1].length : null,
      first: step.nodes.filter(function (node) { return node.depth === 1; }).length || null,
      first_position: step.position, last_position: step.position === null ? null : step.position + Math.max.apply(null, [0].concat(depths)),
      firsts: raw.r.filter(function (rank) { return rank === 0; }).length, gained: raw.e, kept: kept.length || null, rows: step.rows.length,
      highest: extreme(cut, Math.max), lowest: extreme(kept, Math.min),
      path: example && pathText(step, example),
      product: example && example.map(function (node) { return digits(step.nodes[node].confidence); }).join(" × ") + " ≈ " + digits(value(example[example.length - 1])),
      made: Math.max(0, run.lanes.eagle2.pieces.length - 1), steps: run.steps.length, plain: plain,
      step_ms: (1000 * (raw.ms[0] + raw.ms[1] + raw.ms[2])).toFixed(1),
      plain_ms: plain ? (1000 * (other.times[plain] - other.times[0]) / plain).toFixed(1) : null,
      speedup: run.speedup === null ? null : run.speedup.toFixed(2), tau: run.tau === null ? null : run.tau.toFixed(2),
      app: !context.setup.standalone, page: Boolean(context.setup.standalone),
      bonus: step.next.counted && step.next.kind === "bonus", correction: step.next.counted && step.next.kind === "correction",
      chosen: cut.length > 0, uncut: drafted > 0 && !cut.length, guessed: kept.length > 0, dynamic: !fixed, static: fixed, sampled: !greedy,
      greedy: greedy && run.equal !== false, rounded: greedy && run.equal === false,
      none: !step.accepted.length, some: step.accepted.length > 0 && step.number === shown.loss, slower: run.speedup !== null && run.speedup < 1,
    };
  }

  /* A line with its numbers; null where one of them has no value. */
  function fill(line, values) {
    var missing = false;
    var text = line.replace(/\{(\w+)(\?)?(?:\|(\w+))?\}/g, function (_, name, flag, noun) {
      var value = values[name];
      if (value === null || value === undefined || (flag && !value)) { missing = true; return ""; }
      return flag ? "" : noun ? count(value, noun) : String(value);
    });
    return missing ? null : text;
  }

  function makeTour(context, id, started) {
    var root = context.root, stops = context.setup.lessons.tour, at = -1, shown = null, target = null, growing = 0;
    var start = el("button", { type: "button", class: "e2-button e2-wide", "data-testid": "tour-start", hidden: true, text: "Take the tour", onclick: function () { begin(); } });
    var title = el("strong", { class: "e2-tour-title", id: id + "-tour" }), progress = el("span", { class: "e2-tour-progress", "data-testid": "tour-progress" });
    var body = el("div", { class: "e2-tour-text", id: id + "-tour-text", "data-testid": "tour-text" });
    var back = el("button", { type: "button", class: "e2-button e2-wide", "data-testid": "tour-back", text: "Back", onclick: function () { go(at - 1); } });
    var next = el("button", { type: "button", class: "e2-button e2-wide e2-primary", "data-testid": "tour-next", onclick: function () { if (at === stops.length - 1) end(); else go(at + 1); } });
    var over = el("button", { type: "button", class: "e2-button e2-wide", "data-testid": "tour-end", text: "End the tour", onclick: function () { end(); } });
    var card = el("div", {
      class: "e2-tour", role: "dialog", "aria-modal": "false", "aria-labelledby": title.id, "aria-describedby": body.id, tabindex: "-1", "data-testid": "tour", hidden: true,
    }, el("div", { "aria-live": "polite" }, el("div", { class: "e2-tour-head" }, title, progress), body), el("div", { class: "e2-tour-buttons" }, back, next, over));
    root.append(card);

    function begin() {
      if (context.state.kind !== "run" || !context.state.steps.length) return;
      started();
      card.hidden = false;
      context.go(context.state.step, context.phase() === "draft" ? "rerank" : "draft"); // a replay of the race ends where the player moves
      go(0);
      card.focus({ preventScroll: true });
    }

    function go(number) {
      var stop = stops[at = Math.max(0, Math.min(stops.length - 1, number))];
      shown = steps(context.state.run, context.state.steps);
      if (back.contains(document.activeElement) && at === 0) next.focus({ preventScroll: true }); // before it is disabled
      back.disabled = at === 0;
      next.textContent = at === stops.length - 1 ? "Finish" : "Next";
      over.hidden = at === stops.length - 1;
      clearTimeout(growing);
      context.go(shown[stop.step], stop.phase);
      grow();
      write();
      point(stop.target);
    }

    /* Drafting is shown pass by pass. */
    function grow() {
      var state = context.state, more = root.querySelector("[data-testid=next-phase]"), step = context.step();
      var last = step.beats - tools.PHASES.length; // beats after the draft passes: one per other phase
      if (context.phase() !== "draft") return;
      if (context.reduced()) { while (state.beat < last) more.click(); return; }
      var beat = state.beat, number = state.step;
      if (beat < last) growing = setTimeout(function () {
        if (at < 0 || state.step !== number || state.beat !== beat) return; // moved on by hand
        more.click();
        grow();
      }, 1300);
    }

    function write() {
      var stop = stops[at], values = facts(context, shown), lines = stop.lines.map(function (line) { return fill(line, values); }).filter(Boolean);
      var where = at + 1 + " of " + stops.length;
      if (progress.textContent !== where) { title.textContent = stop.title; progress.textContent = where; }
      if (lines.join("\n") === body.dataset.lines) return;
      body.dataset.lines = lines.join("\n");
      body.replaceChildren.apply(body, lines.map(function (line) { return el("p", { dir: "auto", text: line }); }));
    }

    function point(testid) {
      if (target) target.classList.remove("e2-explained");
      target = null;
      // The figures of this phase are drawn by now, but not laid out yet.
      requestAnimationFrame(function () {
        if (at < 0 || stops[at].target !== testid) return;
        var found = root.querySelector('[data-testid="' + testid + '"]');
        for (var up = found; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
        root.style.paddingBottom = card.offsetHeight + 28 + "px"; // what stands last can be scrolled clear of the card
        if (!found || !found.getClientRects().length) { aside(null); return; }
        target = found.closest("figure, .e2-scroll") || found;
        target.classList.add("e2-explained");
        aside(target);
      });
    }

    /* The card goes where it covers least of what it explains, and that into the room that the card leaves. */
    function aside(element) {
      var width = document.documentElement.clientWidth, box = element && element.getBoundingClientRect();
      function covered(left, right) { return box ? Math.max(0, Math.min(right, box.right) - Math.max(left, box.left)) : 0; }
      card.classList.toggle("e2-tour-left", covered(0, 440) < covered(width - 440, width));
      if (!element) return;
      var beside = width > 700 && Math.min(covered(0, 440), covered(width - 440, width)) === 0;
      var room = window.innerHeight - (beside ? 0 : card.offsetHeight + 12);
      var by = box.height + 24 > room ? box.top - 12 : box.top + box.height / 2 - room / 2;
      window.scrollBy({ top: by, behavior: context.reduced() ? "instant" : "smooth" });
    }

    function end() {
      if (at < 0) return;
      at = -1;
      clearTimeout(growing);
      if (target) target.classList.remove("e2-explained");
      target = null;
      var focused = card.contains(document.activeElement);
      card.hidden = true;
      root.style.paddingBottom = "";
      body.dataset.lines = "";
      if (focused) start.focus({ preventScroll: true });
    }

    document.addEventListener("keydown", function (event) {
      if (event.key !== "Escape" || at < 0 || event.defaultPrevented) return;
      end();
      event.preventDefault();
    });

    return {
      start: start, end: end,
      run: function (run) { end(); start.hidden = !run.steps.length; },
      step: function () { if (at >= 0 && shown) write(); },
      resize: function () { if (at >= 0) aside(null); },
    };
  }

  /* ---- the prediction game ---- */

  function makeGame(context, id, started) {
    var root = context.root, plot = root.querySelector("[data-testid=tree]"), on = false;
    var picked = {}, results = {}, listed = null; // per step: the predicted path's end; {hits, made, exact} or why it does not count
    var table = root.querySelector("[data-testid=node-table]");
    if (table) table.closest("details").classList.add("e2-spoiler"); // it tells the verdicts
    root.querySelector("[data-testid=clock]").classList.add("e2-spoiler"); // and this the tokens gained
    var toggle = el("button", { type: "button", class: "e2-button e2-wide e2-predict", "data-testid": "predict", "aria-pressed": "false", text: "Predict", title: "Predict which drafted tokens the target accepts", onclick: function () { set(!on); } });
    var choice = el("select", { id: id + "-path", "data-testid": "predict-path", onchange: function () { pick(choice.value === "" ? null : +choice.value); } });
    var label = el("label", { for: choice.id, text: "Path you expect" });
    function button(text, testid, action) {
      return el("button", { type: "button", class: "e2-button e2-wide", "data-testid": testid, text: text, onclick: action });
    }
    var reveal = button("Reveal", "predict-reveal", function () { leave(function () { context.go(context.state.step, "accept"); }); });
    reveal.classList.add("e2-primary");
    var skip = button("Skip", "predict-skip", function () {
      leave(function () { results[context.step().number] = "Skipped: this step does not count."; context.go(context.state.step, "accept"); });
    });
    var next = button("Next step", "predict-next", function () { leave(function () { context.go(context.state.step + 1, "rerank"); }); });
    var again = button("Start again", "predict-reset", function () { reset(); context.go(0, "rerank"); });
    var status = el("p", { class: "e2-game-status", role: "status", dir: "auto", "data-testid": "predict-status" });
    var score = el("p", { class: "e2-game-score", "data-testid": "predict-score" });
    var panel = el("div", { class: "e2-game-panel", role: "group", "aria-label": "Prediction game", "data-testid": "predict-panel", hidden: true },
      el("div", { class: "e2-game-row" }, label, choice, reveal, skip, next, again), status, score);
    var svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "e2-game-path");
    svg.setAttribute("aria-hidden", "true");
    plot.parentNode.append(svg);
    new MutationObserver(function () {
      if (root.dataset.kind !== "run") set(false);
      paint();
    }).observe(root, { attributes: true, attributeFilter: ["data-drawn", "data-kind"] });

    function early(phase) { return phase === "draft" || phase === "rerank" || phase === "flatten"; }
    function open() { return on && context.step() && !(context.step().number in results) && early(context.phase()); }

    function set(wish) {
      if (on === wish) return;
      if (wish) started();
      on = wish;
      toggle.setAttribute("aria-pressed", String(on));
      root.classList.toggle("e2-game", on);
      panel.hidden = !on;
      reset();
      if (!on) {
        root.classList.remove("e2-guessing");
        root.querySelectorAll(".e2-ahead").forEach(function (hidden) { hidden.classList.remove("e2-ahead"); });
        return;
      }
      // The answer of a step that was verified is known already: begin with another.  A replay of the race ends where the player moves.
      if (early(context.phase())) context.go(context.state.step, context.phase() === "rerank" ? "flatten" : "rerank");
      else context.go(context.state.step + 1 < context.state.steps.length ? context.state.step + 1 : 0, "rerank");
    }

    function reset() {
      picked = {};
      results = {};
      listed = null;
      if (on) show();
      paint();
    }

    function pick(node) {
      var step = context.step();
      if (!open()) return;
      if (node === null) delete picked[step.number];
      else picked[step.number] = node;
      show();
      paint();
    }

    /* Moving on hides the button that was pressed: the focus goes to what can be pressed next. */
    function leave(action) {
      var focused = panel.contains(document.activeElement);
      action();
      if (!focused || (panel.contains(document.activeElement) && document.activeElement.getClientRects().length)) return;
      var to = [next, choice].find(function (item) { return item.getClientRects().length && !item.disabled; });
      (to || root.querySelector("[data-testid=player]")).focus({ preventScroll: true });
    }

    function judge(step) {
      var path = pathTo(step, picked[step.number]), hits = step.accepted.filter(function (node) { return path.indexOf(node) >= 0; }).length;
      var made = step.accepted.length, exact = path.length === made && hits === made;
      results[step.number] = {
        hits: hits, made: made, exact: exact,
        text: "You predicted " + (path.length ? count(path.length, "token") : "none") + ", the target accepted " + (made || "none") + ": " +
          (exact ? (made ? hits + " right, the exact path." : "exactly right.") : hits + " right."),
      };
    }

    /* The list of paths, the sentence and the score, for the step on screen. */
    function show() {
      var step = context.step(), phase = context.phase(), number = step.number;
      var opened = Boolean(open()), result = results[number], node = picked[number];
      root.classList.toggle("e2-guessing", opened);
      if (listed !== number) {
        listed = number;
        choice.replaceChildren(el("option", { value: "", text: "Choose a path" }), el("option", { value: 0, text: "None: nothing is accepted" }));
        step.raw.k.forEach(function (kept) {
          choice.append(el("option", { value: kept, text: pathText(step, pathTo(step, kept)) + " (value " + digits(step.nodes[kept].value) + ")" }));
        });
      }
      choice.value = node === undefined ? "" : String(node);
      choice.disabled = !opened;
      reveal.hidden = skip.hidden = !opened;
      reveal.disabled = node === undefined;
      next.hidden = opened || context.state.step + 1 >= context.state.steps.length;
      var text;
      if (result) text = early(phase) ? "This step is over. " + (result.text || result) : result.text || result;
      else if (node === undefined) text = "Which drafted tokens will the target accept? Click the last of them in the tree, or choose a path. The root stands for none. Play waits at Flatten.";
      else if (node === 0) text = "You predict that nothing is accepted.";
      else text = "You predict " + count(pathTo(step, node).length, "token") + ": " + pathText(step, pathTo(step, node));
      say(status, text);
      var done = Object.keys(results).map(function (key) { return results[key]; }).filter(function (one) { return typeof one !== "string"; });
      function sum(name) { return done.reduce(function (total, one) { return total + Number(one[name]); }, 0); }
      say(score, done.length ? "Exact " + sum("exact") + " of " + count(done.length, "step") + ", " + sum("hits") + " of " + count(sum("made"), "token") : "No step scored yet");
      again.hidden = !Object.keys(results).length;
      spoilers(step, phase);
    }
    function say(element, text) { if (element.textContent !== text) element.textContent = text; }

    /* Hides what would tell the answer: tokens that the EAGLE-2 lane has not reached, in either lane, and later steps' bars. */
    function spoilers(step, phase) {
      var end = context.state.run.ends[step.number] + (phase === "accept" ? step.raw.e : 0);
      Array.prototype.forEach.call(context.lanes.autoregressive.text.children, function (span, i) { span.classList.toggle("e2-ahead", i >= end); });
      root.querySelectorAll(".e2-bar").forEach(function (bar, i) { bar.classList.toggle("e2-ahead", !(i in results)); });
    }

    /* The predicted path over the drawn tree: a dashed line along its edges and around its nodes. */
    function paint() {
      plot.querySelectorAll(".e2-predicted").forEach(function (point) { point.classList.remove("e2-predicted"); });
      svg.replaceChildren();
      var step = context.step(), end = on && step ? picked[step.number] : undefined;
      svg.style.display = end === undefined || !plot.data ? "none" : "";
      if (end === undefined || !plot.data) return;
      svg.setAttribute("width", plot.layout.width);
      svg.setAttribute("height", plot.layout.height);
      [0].concat(pathTo(step, end)).forEach(function (node) {
        var point = plot.querySelector('.point[data-node="' + node + '"]');
        if (point) point.classList.add("e2-predicted");
        var first = "s" + step.number + "n" + node + ".0"; // visual/player.js names an edge's points so
        plot.data.forEach(function (layer) {
          var from = layer.mode === "lines" && layer.ids ? layer.ids.indexOf(first) : -1;
          if (from < 0) return;
          var line = document.createElementNS("http://www.w3.org/2000/svg", "polyline"), points = [];
          for (var i = from; layer.x[i] !== null && i < layer.x.length; i++) points.push(layer.x[i] + "," + layer.y[i]);
          line.setAttribute("points", points.join(" "));
          svg.append(line);
        });
      });
    }

    return {
      toggle: toggle, panel: panel,
      off: function () { set(false); },
      run: function (run) { set(false); toggle.hidden = !run.steps.length; },
      step: function (step, phase) {
        if (!on) return;
        if (!early(phase) && !(step.number in results)) {
          if (step.number in picked) judge(step);
          else results[step.number] = "The target's answer was shown before you chose: this step does not count.";
        }
        if (listed !== step.number) paint();
        show();
      },
      clicked: function (node) {
        if (!open()) return false;
        var step = context.step();
        if (node === 0 || (step.nodes[node] && step.nodes[node].kept)) pick(node);
        else say(status, "That node was cut: the target does not check it. Choose one of the kept nodes.");
        return true;
      },
      holds: function () { return Boolean(open()) && context.phase() === "flatten"; },
    };
  }

  /* ---- together ---- */

  function make(context) {
    var id = "e2-lessons-" + ++serial, root = context.root, said = root.querySelector("[data-testid=phase]");
    var terms = makeTerms(context, id);
    var tour = makeTour(context, id, function () { terms.hide(); game.off(); });
    var game = makeGame(context, id, function () { tour.end(); });
    said.after(terms.line, game.panel);
    root.append(terms.glossary);
    lessonsOf.set(context, game);
    new MutationObserver(function () { if (root.dataset.kind !== "run") tour.end(); }).observe(root, { attributes: true, attributeFilter: ["data-kind"] });
    setTimeout(terms.wrapAll, 0); // once the other parts are there
    return {
      root: el("div", { class: "e2-tour-offer" }, tour.start),
      run: function (run) {
        tour.run(run);
        game.run(run);
        setTimeout(terms.wrapAll, 0);
      },
      live: function () { tour.end(); game.off(); },
      step: function (step, phase) {
        terms.step(phase);
        game.step(step, phase);
        tour.step();
      },
      resize: tour.resize,
      clicked: game.clicked,
      holds: game.holds,
    };
  }

  window.Eagle2Player.part("head", make);
  window.Eagle2Player.part("tools", function (context) { return { root: lessonsOf.get(context).toggle }; });
})();
