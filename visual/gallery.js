/* The row of recorded runs.
 *
 * Eagle2Gallery.mount(element, choose) returns {show(state)}; the state comes from visual/gallery.py:
 * {cards: [{id, title, prompt, facts, look}], current, busy}.  Prompts are hostile: textContent only.
 */
(function () {
  "use strict";

  function el(tag, name, text) {
    var node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function mount(element, choose) {
    var row = el("ul", "e2-cards");
    row.dataset.testid = "gallery";
    row.setAttribute("aria-label", "Recorded runs");
    var look = el("p", "e2-look");
    look.dataset.testid = "look";
    element.append(row, look);
    var buttons = {}; // kept from one state to the next, so that the focus stays where it is
    var current = null;

    function make(id) {
      var button = el("button", "e2-card");
      button.type = "button";
      button.dataset.run = id;
      ["title", "prompt", "facts"].forEach(function (part) { button.append(el("span", "e2-card-" + part)); });
      button.children[1].dir = "auto";
      button.addEventListener("click", function () { if (button.getAttribute("aria-disabled") !== "true") choose(id); });
      return button;
    }

    function show(state) {
      var items = state.cards.map(function (card) {
        var button = buttons[card.id] || (buttons[card.id] = make(card.id));
        button.children[0].textContent = card.title;
        button.children[1].textContent = card.prompt;
        button.children[2].replaceChildren.apply(button.children[2], card.facts.map(function (fact) { return el("span", "", fact); }));
        // Not `disabled`, which would take the focus away.
        button.setAttribute("aria-disabled", String(state.busy));
        button.title = state.busy ? "A run is under way: wait for its end or press Stop." : card.prompt;
        if (card.id === state.current) button.setAttribute("aria-current", "true");
        else button.removeAttribute("aria-current");
        if (!button.parentNode) el("li").append(button);
        return button.parentNode;
      });
      Array.from(row.children).forEach(function (item) { if (items.indexOf(item) < 0) item.remove(); });
      items.forEach(function (item, i) { if (row.children[i] !== item) row.insertBefore(item, row.children[i] || null); });
      var chosen = state.cards.find(function (card) { return card.id === state.current; });
      look.textContent = chosen && chosen.look ? "What to look at: " + chosen.look : "";
      look.hidden = !look.textContent;
      if (chosen && state.current !== current) { // only sideways: the page itself stays where it is
        var item = buttons[chosen.id].parentNode;
        row.scrollLeft += item.getBoundingClientRect().left - row.getBoundingClientRect().left - 16;
      }
      current = state.current;
    }

    return { show: show };
  }

  window.Eagle2Gallery = { mount: mount };
})();
