const groups = all(".group");
const branches = all("#tree li[data-groups]");
const folds = all("details");
const body = document.querySelector("#matrix tbody");
const rows = body ? [...body.rows] : [];

// --- Rows of the matrix: the matching rows, in their order; more of them on scrolling.
const STEP = 200;
let [order, chosen, limit] = [rows, null, STEP];
const more = document.createElement("button");
more.type = "button";
more.id = "more";
const page = () => {
  let matches = 0;
  for (const row of order) {
    const isMatch = !chosen || chosen.has(row);
    matches += isMatch ? 1 : 0;
    row.hidden = !isMatch || matches > limit;
  }
  const left = matches - limit;
  more.hidden = left <= 0;
  more.textContent = "show " + Math.min(STEP, left) + " of " + left + " more rows";
};
const showMore = () => {
  limit += STEP;
  page();
};
if (body) {
  byId("matrix").append(more);
  more.addEventListener("click", showMore);
  new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) showMore();
  }).observe(more);
}

// --- Ranks as the page writes them: 0-6,8-511 and, at equal distances, 0-504/8.
const parts = (ranks) => ranks.split(",").filter((part) => part).map((part) => {
  const [ends, step] = part.split("/");
  const [first, last] = ends.split("-").map(Number);
  return [first, last === undefined ? first : last, Number(step) || 1];
});
const overlap = (left, right) => left.some(([first, last, step]) => right.some(([from, to, by]) => {
  const [low, high] = [Math.max(first, from), Math.min(last, to)];
  if (low > high) return false;
  if (step === 1 && by === 1) return true;
  // Try each number of the shorter sequence.
  const [start, each, other] = (last - first) / step < (to - from) / by
    ? [first, step, [from, by]] : [from, by, [first, step]];
  for (let at = start + Math.ceil(Math.max(0, low - start) / each) * each; at <= high; at += each) {
    if ((at - other[0]) % other[1] === 0) return true;
  }
  return false;
}));

// --- The index of the search: made when it is first needed.
// Every letter keeps its position: some are longer in lower case.
const lower = (original) => {
  const low = original.toLowerCase();
  return low.length === original.length ? low : [...original].map((letter) => {
    const small = letter.toLowerCase();
    return small.length === letter.length ? small : letter;
  }).join("");
};
const text = (element) => {
  const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walk.nextNode()) texts.push(walk.currentNode.nodeValue);
  return lower(texts.join("\n"));
};
const item = (element) => ({
  element,
  text: text(element) + "\n" + lower(element.dataset.nodes),
  // The text that is true of all its ranks.
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
    index.top = index.rows.concat(index.groups).flatMap((entry) => entry.ranks)
      .reduce((highest, part) => Math.max(highest, part[1]), -1);
  }
  return index;
};

// --- A search is words, and all must match. "rank 3-5", "pid 4711" and "state D" are one word.
const number = /^[0-9]+(-[0-9]+)?(\/[0-9]+)?(,[0-9]+(-[0-9]+)?(\/[0-9]+)?)*$/;
const read = (typed) => {
  const words = wordsOf(lower(typed));
  const terms = [];
  for (let at = 0; at < words.length; at += 1) {
    const [word, next] = [words[at], words[at + 1] || ""];
    const plain = word.replaceAll('"', "");
    if (/^ranks?$/.test(word) && number.test(next)) {
      terms.push({ ranks: parts(next) });
      at += 1;
    } else if (word === "pid" && /^[0-9]+$/.test(next)) {
      terms.push({ pid: next });
      at += 1;
    } else if (word === "state" && /^[a-z]$/.test(next)) {
      terms.push({ state: next });
      at += 1;
    } else if (number.test(word)) {
      const ranks = parts(word);
      const isRank = ranks.some(([first]) => first <= indexed().top);
      if (isRank) terms.push({ ranks });
      else if (indexed().pids.has(word)) terms.push({ pid: word });
      else terms.push({ text: word });
    } else if (plain) {
      terms.push({ text: plain });
    }
  }
  return terms;
};
const matches = (entry, term) => {
  if (term.ranks) return overlap(entry.ranks, term.ranks);
  if (term.pid) return entry.pids.has(term.pid);
  if (term.state) return entry.states.includes(term.state);
  return entry.text.includes(term.text);
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

// --- A match inside of a fold unfolds it; the end of the search folds it again.
const unfolded = new Set();
const reveal = (element, words) => {
  for (const details of [element, ...all("details", element)]) {
    const inside = details.open ? "" : text(details).slice(text(details.firstElementChild).length);
    if (!details.open && words.some((word) => inside.includes(word))) {
      details.open = true;
      unfolded.add(details);
    }
  }
};
const filter = () => {
  for (const details of unfolded) details.open = false;
  unfolded.clear();
  const terms = read(find.value);
  const shown = new Set();
  limit = STEP;
  if (!terms.length) {
    for (const element of [...groups, ...branches]) element.hidden = false;
    chosen = null;
    page();
    count.textContent = "";
    mark([], []);
    return;
  }
  const entries = indexed();
  entries.groups.forEach((group, at) => {
    const isMatch = terms.every((term) => matches(group, term));
    group.element.hidden = !isMatch;
    if (isMatch) shown.add(at);
  });
  chosen = new Set(entries.rows.filter((row) => {
    const { shared } = entries.groups[Number(row.element.dataset.group) - 1];
    return terms.every((term) => matches(row, term) || (term.text && shared.includes(term.text)));
  }).map((row) => row.element));
  page();
  branches.forEach((branch) => {
    branch.hidden = !branch.dataset.groups.split(" ").some((at) => shown.has(Number(at)));
  });
  count.textContent = shown.size + " of " + groups.length + " groups"
    + (rows.length ? ", " + chosen.size + " of " + rows.length + " rows" : "");
  const words = terms.map((term) => term.text || term.pid || "").filter((word) => word);
  const first = [...shown].slice(0, 20).map((at) => groups[at]);
  first.forEach((group) => reveal(group, words));
  mark([...order.filter((row) => !row.hidden), ...first,
    ...["verdict", "witnesses", "tree"].map(byId).filter((element) => element)], words);
};
const search = searchable(filter, 60);

// --- The matrix sorts by its columns: up, down, and as it was.
const collate = new Intl.Collator("en", { numeric: true }).compare;
const key = (row, at) => {
  const cell = row.cells[at];
  return cell.dataset.sort === undefined ? cell.textContent : Number(cell.dataset.sort);
};
const compare = (left, right) => (typeof left === "number" ? left - right : collate(left, right));
all("#matrix thead th").forEach((head, at, heads) => {
  const button = document.createElement("button");
  button.type = "button";
  button.append(head.firstElementChild);
  head.prepend(button);
  button.addEventListener("click", () => {
    // The strongest statements of a witness come first.
    const turns = at < 6 ? ["ascending", "descending", null] : ["descending", "ascending", null];
    const turn = turns[(turns.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
    heads.forEach((column) => column.removeAttribute("aria-sort"));
    if (turn) head.setAttribute("aria-sort", turn);
    const sign = turn === "descending" ? -1 : 1;
    const keyed = rows.map((row) => [turn ? key(row, at) : 0, Number(row.dataset.order), row]);
    keyed.sort((left, right) => sign * compare(left[0], right[0]) || left[1] - right[1]);
    order = keyed.map((row) => row[2]);
    page();
    body.append(...order);
  });
});

// --- A link shows its target, even if that is folded or filtered away.
const lead = (hash) => {
  const target = /^#[a-z]+[0-9]*$/.test(hash) && document.querySelector(hash);
  if (!target) return;
  if (target.hidden) search("");
  for (let element = target; element; element = element.parentElement) {
    if (element.tagName === "DETAILS") {
      element.open = true;
      unfolded.delete(element);
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

const fold = (open) => {
  unfolded.clear();
  folds.forEach((details) => { details.open = open; });
};
byId("open").addEventListener("click", () => fold(true));
byId("close").addEventListener("click", () => fold(false));
let before = [];
window.addEventListener("beforeprint", () => {
  before = folds.map((details) => details.open);
  folds.forEach((details) => { details.open = true; });
  limit = Infinity;
  page();
});
window.addEventListener("afterprint", () => {
  folds.forEach((details, at) => { details.open = before[at]; });
  limit = STEP;
  page();
});
lead(location.hash);
filter();
