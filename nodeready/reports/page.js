"use strict";
// What the pages have in common: the search box.
const byId = (id) => document.getElementById(id);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const [find, count] = ["find", "count"].map(byId);
// Words; what stands between quotes is one.
const wordsOf = (typed) => typed.match(/"[^"]*"?|[^\s"]+/g) || [];
// Search this long after the last letter; "/" leads to the box, and Escape empties it.
// Returns a function that searches for words.
const searchable = (filter, delay) => {
  const search = (words) => {
    find.value = words;
    filter();
  };
  let waiting = 0;
  find.addEventListener("input", () => {
    window.clearTimeout(waiting);
    waiting = window.setTimeout(filter, delay);
  });
  document.addEventListener("keydown", (event) => {
    const isInside = document.activeElement === find;
    if (event.key === "/" && !isInside && !document.querySelector("dialog[open]")) {
      event.preventDefault();
      find.focus();
    } else if (event.key === "Escape" && isInside) {
      search("");
    }
  });
  byId("search").hidden = false;
  return search;
};
