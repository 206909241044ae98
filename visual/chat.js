/* A conversation.
 *
 * Eagle2Chat.mount(element, choose) returns {show(state)}; the state comes from visual/chat.py: {start, messages: [{role,
 * pieces, origins, facts, trees}], note, level, busy}.  choose(i) asks for the trees of message i.  What people and models
 * write is hostile: textContent only.
 */
(function () {
  "use strict";

  var EMPTY = "Write a message below. Answers are drafted and checked as in the race; what was said before is not computed again.";
  var LEGEND = [["drafted", "drafted and accepted"], ["bonus", "the model's own"], ["correction", "the model's own, instead of a draft"]];

  function el(tag, name, text) {
    var node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function mount(element, choose) {
    var list = el("div", "e2-chat");
    list.dataset.testid = "chat";
    list.tabIndex = 0; // it scrolls
    list.setAttribute("role", "log");
    list.setAttribute("aria-label", "Conversation");
    var note = el("p", "e2-chat-note");
    note.dataset.testid = "chat-note";
    note.setAttribute("role", "status");
    var legend = el("ul", "e2-legend");
    LEGEND.forEach(function (pair) {
      var item = el("li");
      item.append(el("span", "e2-token e2-" + pair[0], "token"), " " + pair[1]);
      legend.append(item);
    });
    element.append(list, note, legend);
    var shown = []; // {message, node, said} of each message on the page

    function make(message) {
      var node = el("div", "e2-chat-message");
      node.dataset.role = message.role;
      node.append(el("div", "e2-chat-who", message.role === "user" ? "You" : "Model"));
      var said = el("div", "e2-said");
      said.dir = "auto";
      node.append(said, el("div", "e2-chat-facts"));
      list.append(node);
      return { message: { pieces: [] }, node: node, said: said };
    }

    function fill(part, message, index) {
      var before = part.message.pieces;
      // An answer grows at its end; anything else is written anew.
      var same = before.every(function (piece, i) { return i >= before.length - 1 || piece === message.pieces[i]; });
      var from = same && before.length <= message.pieces.length ? Math.max(before.length - 1, 0) : 0;
      while (part.said.childNodes.length > from) part.said.lastChild.remove();
      for (var i = from; i < message.pieces.length; i++) {
        var origin = message.origins[i];
        part.said.append(el("span", origin ? "e2-token e2-" + origin : "", message.pieces[i]));
      }
      var facts = part.node.lastChild;
      facts.replaceChildren.apply(facts, message.facts.map(function (fact) { return el("span", "", fact); }));
      if (message.trees) {
        var button = el("button", "e2-chat-trees", "Show its trees");
        button.type = "button";
        button.dataset.testid = "chat-trees";
        button.addEventListener("click", function () { choose(index); });
        facts.append(button);
      }
      part.message = message;
    }

    function show(state) {
      var atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      if (state.start > shown.length) return; // the whole state comes at the answer's end
      while (shown.length > state.start + state.messages.length) shown.pop().node.remove();
      if (state.start + state.messages.length) list.querySelectorAll(".e2-chat-empty").forEach(function (node) { node.remove(); });
      state.messages.forEach(function (message, i) {
        var index = state.start + i;
        var part = shown[index];
        if (part && part.message.role !== message.role) { shown.splice(index).forEach(function (old) { old.node.remove(); }); part = null; }
        if (!part) part = shown[index] = make(message);
        if (JSON.stringify(part.message) !== JSON.stringify(message)) fill(part, message, index);
      });
      if (!shown.length && !list.firstChild) list.append(el("p", "e2-chat-empty", EMPTY));
      list.setAttribute("aria-busy", String(state.busy)); // read out once it is whole
      note.textContent = state.note;
      note.dataset.level = state.level;
      if (atEnd) list.scrollTop = list.scrollHeight;
    }

    show({ start: 0, messages: [], note: "", level: "info", busy: false });
    return { show: show };
  }

  window.Eagle2Chat = { mount: mount };
})();
