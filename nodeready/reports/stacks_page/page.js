"use strict";
const byId = (id) => document.getElementById(id);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const [find, said] = [byId("find"), byId("said")];
const groups = all(".group");
const branches = all("#tree li[data-groups]");
const folds = all("details");
const body = document.querySelector("#matrix tbody");
const rows = body ? [...body.rows] : [];

// --- Rows of the matrix: those that were found, in their order; the next ones when one scrolls there.
const STEP = 200;
let [order, chosen, most] = [rows, null, STEP];
const more = document.createElement("button");
more.type = "button";
more.id = "more";
const page = () => {
  let found = 0;
  for (const row of order) {
    const on = !chosen || chosen.has(row);
    found += on ? 1 : 0;
    row.hidden = !on || found > most;
  }
  more.hidden = found <= most;
  more.textContent = "show " + Math.min(STEP, found - most) + " of " + (found - most) + " more rows";
};
const further = () => {
  most += STEP;
  page();
};
if (body) {
  byId("matrix").append(more);
  more.addEventListener("click", further);
  new IntersectionObserver((seen) => {
    if (seen.some((one) => one.isIntersecting)) further();
  }).observe(more);
}

// --- Ranks as the page writes them: 0-6,8-511 and, at equal distances, 0-504/8.
const parts = (ranks) => ranks.split(",").filter((part) => part).map((part) => {
  const [ends, step] = part.split("/");
  const [first, last] = ends.split("-").map(Number);
  return [first, last === undefined ? first : last, Number(step) || 1];
});
const meet = (ours, asked) => ours.some(([first, last, step]) => asked.some(([from, to, by]) => {
  const [low, high] = [Math.max(first, from), Math.min(last, to)];
  if (low > high) return false;
  if (step === 1 && by === 1) return true;
  // The fewer numbers are tried one by one.
  const [start, each, other] = (last - first) / step < (to - from) / by
    ? [first, step, [from, by]] : [from, by, [first, step]];
  for (let at = start + Math.ceil(Math.max(0, low - start) / each) * each; at <= high; at += each) {
    if ((at - other[0]) % other[1] === 0) return true;
  }
  return false;
}));

// --- What is searched: made when it is first needed.
// Every letter in its place: some are longer in lower case.
const lower = (given) => {
  const low = given.toLowerCase();
  return low.length === given.length ? low : [...given].map((letter) => {
    const one = letter.toLowerCase();
    return one.length === letter.length ? one : letter;
  }).join("");
};
const text = (element) => {
  const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walk.nextNode()) found.push(walk.currentNode.nodeValue);
  return lower(found.join("\n"));
};
const item = (element) => ({
  element,
  text: text(element) + "\n" + lower(element.dataset.nodes),
  // What is true of all its ranks: not who they are.
  shared: all("summary > .what, :scope > div > :not(.members)", element).map(text).join("\n"),
  ranks: parts(element.dataset.ranks),
  pids: new Set(element.dataset.pids.split(" ")),
  states: element.dataset.states.toLowerCase().split(" "),
});
let index = null;
const indexed = () => {
  if (!index) {
    index = { groups: groups.map(item), rows: rows.map(item) };
    index.pids = new Set(index.rows.flatMap((row) => [...row.pids]));
    index.top = index.rows.concat(index.groups).flatMap((one) => one.ranks)
      .reduce((most, part) => Math.max(most, part[1]), -1);
  }
  return index;
};

// --- A search is words; each has to fit. "rank 3-5", "pid 4711" and "state D" are one word.
const number = /^[0-9]+(-[0-9]+)?(\/[0-9]+)?(,[0-9]+(-[0-9]+)?(\/[0-9]+)?)*$/;
const read = (typed) => {
  const words = lower(typed).match(/"[^"]*"?|[^\s"]+/g) || [];
  const asked = [];
  for (let at = 0; at < words.length; at += 1) {
    const [word, next] = [words[at], words[at + 1] || ""];
    const plain = word.replaceAll('"', "");
    if (/^ranks?$/.test(word) && number.test(next)) {
      asked.push({ ranks: parts(next) });
      at += 1;
    } else if (word === "pid" && /^[0-9]+$/.test(next)) {
      asked.push({ pid: next });
      at += 1;
    } else if (word === "state" && /^[a-z]$/.test(next)) {
      asked.push({ state: next });
      at += 1;
    } else if (number.test(word)) {
      const ranks = parts(word);
      const some = ranks.some(([first]) => first <= indexed().top);
      if (some) asked.push({ ranks });
      else if (indexed().pids.has(word)) asked.push({ pid: word });
      else asked.push({ text: word });
    } else if (plain) {
      asked.push({ text: plain });
    }
  }
  return asked;
};
const fits = (one, asked) => {
  if (asked.ranks) return meet(one.ranks, asked.ranks);
  if (asked.pid) return one.pids.has(asked.pid);
  if (asked.state) return one.states.includes(asked.state);
  return one.text.includes(asked.text);
};

// --- Marks: ranges that the browser paints; the page itself stays as it is.
const marks = "highlights" in CSS ? new Highlight() : null;
if (marks) CSS.highlights.set("found", marks);
const mark = (roots, words) => {
  if (!marks) return;
  marks.clear();
  if (!words.length) return;
  let left = 2000;
  for (const root of roots) {
    const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (left > 0 && walk.nextNode()) {
      const [node, low] = [walk.currentNode, lower(walk.currentNode.nodeValue)];
      for (const word of words) {
        for (let at = low.indexOf(word); at >= 0 && left > 0; at = low.indexOf(word, at + word.length)) {
          const range = document.createRange();
          range.setStart(node, at);
          range.setEnd(node, at + word.length);
          marks.add(range);
          left -= 1;
        }
      }
    }
  }
};

// --- What is found inside of a fold unfolds it, and folds again when the search ends.
const unfolded = new Set();
const reveal = (element, words) => {
  for (const one of [element, ...all("details", element)]) {
    const inside = one.open ? "" : text(one).slice(text(one.firstElementChild).length);
    if (!one.open && words.some((word) => inside.includes(word))) {
      one.open = true;
      unfolded.add(one);
    }
  }
};
const filter = () => {
  for (const one of unfolded) one.open = false;
  unfolded.clear();
  const asked = read(find.value);
  const shown = new Set();
  most = STEP;
  if (!asked.length) {
    for (const one of [...groups, ...branches]) one.hidden = false;
    chosen = null;
    page();
    said.textContent = "";
    mark([], []);
    return;
  }
  const found = indexed();
  found.groups.forEach((group, at) => {
    const on = asked.every((word) => fits(group, word));
    group.element.hidden = !on;
    if (on) shown.add(at);
  });
  chosen = new Set(found.rows.filter((row) => {
    const { shared } = found.groups[Number(row.element.dataset.group) - 1];
    return asked.every((word) => fits(row, word) || (word.text && shared.includes(word.text)));
  }).map((row) => row.element));
  page();
  branches.forEach((branch) => {
    branch.hidden = !branch.dataset.groups.split(" ").some((at) => shown.has(Number(at)));
  });
  said.textContent = shown.size + " of " + groups.length + " groups"
    + (rows.length ? ", " + chosen.size + " of " + rows.length + " rows" : "");
  const words = asked.map((word) => word.text || word.pid || "").filter((word) => word);
  const first = [...shown].slice(0, 20).map((at) => groups[at]);
  first.forEach((group) => reveal(group, words));
  mark([...order.filter((row) => !row.hidden), ...first,
    ...["verdict", "witnesses", "tree"].map(byId).filter((one) => one)], words);
};
let waiting = 0;
find.addEventListener("input", () => {
  window.clearTimeout(waiting);
  waiting = window.setTimeout(filter, 60);
});

// --- The matrix sorts by its columns: up, down, and as it was.
const collate = new Intl.Collator("en", { numeric: true }).compare;
const key = (row, at) => {
  const cell = row.cells[at];
  return cell.dataset.sort === undefined ? cell.textContent : Number(cell.dataset.sort);
};
const compare = (one, other) => (typeof one === "number" ? one - other : collate(one, other));
all("#matrix thead th").forEach((head, at, heads) => {
  const button = document.createElement("button");
  button.type = "button";
  button.append(head.firstElementChild);
  head.prepend(button);
  button.addEventListener("click", () => {
    // What a witness says most of comes first.
    const turns = at < 6 ? ["ascending", "descending", null] : ["descending", "ascending", null];
    const turn = turns[(turns.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
    heads.forEach((one) => one.removeAttribute("aria-sort"));
    if (turn) head.setAttribute("aria-sort", turn);
    const sign = turn === "descending" ? -1 : 1;
    const keyed = rows.map((row) => [turn ? key(row, at) : 0, Number(row.dataset.order), row]);
    keyed.sort((one, other) => sign * compare(one[0], other[0]) || one[1] - other[1]);
    order = keyed.map((row) => row[2]);
    page();
    body.append(...order);
  });
});

// --- A link shows where it leads, whatever is folded or filtered away.
const lead = (hash) => {
  const target = /^#[a-z]+[0-9]*$/.test(hash) && document.querySelector(hash);
  if (!target) return;
  if (target.hidden) {
    find.value = "";
    filter();
  }
  for (let one = target; one; one = one.parentElement) {
    if (one.tagName === "DETAILS") {
      one.open = true;
      unfolded.delete(one);
    }
  }
  target.scrollIntoView({ block: "start" });
  const summary = target.querySelector("summary");
  if (summary) summary.focus({ preventScroll: true });
};
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (link) window.setTimeout(() => lead(link.getAttribute("href")), 0);
});
window.addEventListener("hashchange", () => lead(location.hash));

document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== find) {
    event.preventDefault();
    find.focus();
  } else if (event.key === "Escape" && document.activeElement === find) {
    find.value = "";
    filter();
  }
});
const fold = (open) => {
  unfolded.clear();
  folds.forEach((one) => { one.open = open; });
};
byId("open").addEventListener("click", () => fold(true));
byId("close").addEventListener("click", () => fold(false));
let before = [];
window.addEventListener("beforeprint", () => {
  before = folds.map((one) => one.open);
  folds.forEach((one) => { one.open = true; });
  most = Infinity;
  page();
});
window.addEventListener("afterprint", () => {
  folds.forEach((one, at) => { one.open = before[at]; });
  most = STEP;
  page();
});
byId("search").hidden = false;
lead(location.hash);
filter();
