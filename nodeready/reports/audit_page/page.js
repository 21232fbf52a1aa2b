const { nodes, findings, results, passed, parts, tables, texts } = JSON.parse(
  byId("data").textContent);
// The members of a node in the data.
const [NAME, STATUS, GROUP, ERROR, SECONDS, RESULTS, DIFFERENCES, PASSED, PARTS] = Array(9).keys();
const [grid, tip, dialog] = ["grid", "tip", "node"].map(byId);
const squares = all("i", grid);
const numberOf = new Map(squares.map((square, number) => [square, number]));
const cards = all(".finding");

// Texts of nodes become text and never markup.
const make = (tag, name, ...children) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
};
const counted = (number, noun) => number + " " + noun + (number === 1 ? "" : "s");
const badge = (status) => {
  const item = all("#counts li").find((row) => row.dataset.status === status);
  return item.querySelector(".status").cloneNode(true);
};
const table = (heads, rows, name = "") => {
  const head = make("tr", "", ...heads.map((text) => make("th", "", text)));
  const body = rows.map((cells) => make("tr", "", ...cells.map((cell) => make("td", "", cell))));
  return make("div", "wide", make("table", name, head, ...body));
};

// --- One node.
const describe = (number) => {
  const node = nodes[number];
  const bad = node[RESULTS].map((result) => texts[results[result][1]]);
  const more = bad.length > 3 ? " and " + (bad.length - 3) + " more" : "";
  const what = texts[node[ERROR]] || bad.slice(0, 3).join(", ") + more;
  return texts[node[NAME]] + ": " + texts[node[STATUS]] + (what ? ", " + what : "");
};
const listed = (title, numbers) => make("details", "", make("summary", "soft", title),
  make("p", "mono", numbers.map((number) => texts[number]).join("  ")));
const show = (number) => {
  const node = nodes[number];
  const close = make("button", "", "Close");
  close.addEventListener("click", () => dialog.close());
  const [ok, na] = passed[node[PASSED]];
  const head = make("p", "", badge(texts[node[STATUS]]),
    [texts[node[GROUP]], node[SECONDS] ? "probed in " + node[SECONDS] + " s" : ""]
      .filter((text) => text).map((text) => ", " + text).join(""));
  dialog.replaceChildren(close, make("h2", "", texts[node[NAME]]), head);
  if (texts[node[ERROR]]) dialog.append(make("p", "line", texts[node[ERROR]]));
  if (node[RESULTS].length) {
    const rows = node[RESULTS].map((result) => {
      const [status, ...cells] = results[result].map((text) => texts[text]);
      return [make("span", "status " + status, status), ...cells];
    });
    dialog.append(make("h3", "", "Findings"),
      table(["status", "check", "cost", "value", "expected", "source", "fix"], rows));
  }
  if (node[DIFFERENCES].length) {
    dialog.append(make("h3", "", "Differs from its peers"),
      ...node[DIFFERENCES].map((text) => make("p", "line", texts[text])));
  }
  tables.forEach(([title, ...heads], at) => {
    const rows = node[PARTS].map((part) => parts[part]).filter((part) => part[0] === at)
      .map((part) => part.slice(1).map((text) => texts[text]));
    const used = heads.map((_, column) => rows.some((row) => row[column]));
    const chosen = (cells) => cells.filter((_, column) => used[column]);
    if (rows.length) dialog.append(make("h3", "", title), table(chosen(heads), rows.map(chosen), "part"));
  });
  if (ok.length) dialog.append(listed(counted(ok.length, "check") + " passed", ok));
  if (na.length) dialog.append(listed(counted(na.length, "check") + " not applicable", na));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
};
const numberByName = (name) => nodes.findIndex((node) => texts[node[NAME]] === name);
const address = (number) => "#node=" + encodeURIComponent(texts[nodes[number][NAME]]);
const follow = () => {
  const match = /^#node=(.*)/.exec(location.hash);
  const number = match ? numberByName(decodeURIComponent(match[1])) : -1;
  if (number >= 0) show(number);
  else if (dialog.open) dialog.close();
};
window.addEventListener("hashchange", follow);
dialog.addEventListener("close", () => {
  if (location.hash.startsWith("#node=")) history.replaceState(null, "", "#");
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();
});

// --- The grid: a pointer, or the arrow keys.
const point = (square) => {
  const number = square ? numberOf.get(square) : undefined;
  tip.hidden = number === undefined;
  if (tip.hidden) return;
  tip.textContent = describe(number);
  const place = square.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = place.bottom + 6 + "px";
};
let cursor = null;
const move = (square) => {
  if (!square || !numberOf.has(square)) return;
  if (cursor) cursor.classList.remove("cursor");
  cursor = square;
  cursor.classList.add("cursor");
  cursor.scrollIntoView({ block: "nearest" });
  point(cursor);
};
const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
grid.tabIndex = 0;
grid.addEventListener("mouseover", (event) => point(event.target));
grid.addEventListener("mouseleave", () => point(null));
grid.addEventListener("blur", () => point(null));
grid.addEventListener("click", (event) => {
  const number = numberOf.get(event.target);
  if (number !== undefined) location.hash = address(number);
});
grid.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && cursor) location.hash = address(numberOf.get(cursor));
  if (!(event.key in STEPS)) return;
  event.preventDefault();
  const [across, down] = STEPS[event.key];
  if (!cursor) move(squares[0]);
  else if (across) move(squares[numberOf.get(cursor) + across]);
  else {
    const place = cursor.getBoundingClientRect();
    move(document.elementFromPoint(place.left + 6, place.top + 6 + down * (place.height + 1)));
  }
});

// --- The index of the search: made while the reader reads, or when it is first needed.
let index = null;
const indexed = () => {
  if (index) return index;
  const small = texts.map((text) => text.toLowerCase());
  const starts = new Uint32Array(small.length + 1);
  small.forEach((text, number) => { starts[number + 1] = starts[number] + text.length + 1; });
  // The texts of each node, without those of its findings.
  const ends = new Uint32Array(nodes.length);
  const numbers = [];
  nodes.forEach((node, number) => {
    numbers.push(node[NAME], node[STATUS], node[GROUP], node[ERROR], ...node[DIFFERENCES]);
    for (const part of node[PARTS]) numbers.push(...parts[part].slice(1));
    ends[number] = numbers.length;
  });
  index = { joined: small.join("\n"), starts, ends, numbers: Uint32Array.from(numbers) };
  return index;
};
// The texts with a word, as a flag for each text.
const textsWith = (word) => {
  const { joined, starts } = indexed();
  const flags = new Uint8Array(texts.length);
  let number = 0;
  for (let at = joined.indexOf(word); at >= 0; at = joined.indexOf(word, starts[number])) {
    while (starts[number + 1] <= at) number += 1;
    flags[number] = 1;
    number += 1;
    if (number >= texts.length) break;
  }
  return flags;
};
const inRuns = (runs, flags) => {
  for (let at = 0; at < runs.length; at += 2) {
    for (let number = runs[at]; number < runs[at] + runs[at + 1]; number += 1) {
      if (flags[number]) return true;
    }
  }
  return false;
};
const nodesWith = (word) => {
  const flags = new Uint8Array(nodes.length);
  const status = /^status:(.*)/.exec(word);
  if (status) {
    nodes.forEach((node, number) => { flags[number] = texts[node[STATUS]] === status[1] ? 1 : 0; });
    return flags;
  }
  const { ends, numbers } = indexed();
  const has = textsWith(word);
  const inResult = results.map((result) => result.some((text) => has[text]));
  let at = 0;
  nodes.forEach((node, number) => {
    for (; at < ends[number]; at += 1) {
      if (has[numbers[at]]) {
        flags[number] = 1;
        at = ends[number];
      }
    }
    if (!flags[number] && node[RESULTS].some((result) => inResult[result])) flags[number] = 1;
  });
  return flags;
};

// --- A search is words, and a node has to match all of them.
const ROWS = 100;
const matches = byId("matches");
// Without the sets of nodes, which name only some of their nodes in full.
const cardTexts = cards.map((card) => all("summary > :not(.where), .line:not(.nodes)", card)
  .map((element) => element.textContent).join("\n").toLowerCase());
const list = (numbers) => {
  const rows = numbers.slice(0, ROWS).map((number) => {
    const link = make("a", "", texts[nodes[number][NAME]]);
    link.href = address(number);
    const bad = nodes[number][RESULTS].map((result) => texts[results[result][1]]);
    return [link, badge(texts[nodes[number][STATUS]]), texts[nodes[number][GROUP]],
      texts[nodes[number][ERROR]] || bad.join(", ")];
  });
  matches.replaceChildren(make("h2", "", "Nodes (" + numbers.length + ")"),
    table(["node", "status", "group", "findings"], rows));
  if (numbers.length > ROWS) matches.append(make("p", "", "and " + (numbers.length - ROWS) + " more"));
};
const filter = () => {
  const words = wordsOf(find.value.toLowerCase())
    .map((word) => word.replaceAll('"', "")).filter((word) => word);
  grid.classList.toggle("searching", words.length > 0);
  matches.hidden = words.length === 0;
  if (!words.length) {
    cards.forEach((card) => { card.hidden = false; });
    count.textContent = "";
    return;
  }
  const flags = words.map(nodesWith).reduce((left, right) => left.map((flag, at) => flag & right[at]));
  const numbers = [];
  flags.forEach((flag, number) => {
    if (flag) numbers.push(number);
    squares[number].classList.toggle("hit", flag === 1);
  });
  // The findings with these words; where no finding has them, those of the nodes.
  const named = cardTexts.map((text) => words.every((word) => text.includes(word)));
  const isNamed = named.some((flag) => flag);
  cards.forEach((card, at) => { card.hidden = isNamed ? !named[at] : !inRuns(findings[at], flags); });
  const cardCount = cards.filter((card) => !card.hidden).length;
  list(numbers);
  count.textContent = numbers.length + " of " + counted(nodes.length, "node")
    + (cards.length ? ", " + cardCount + " of " + counted(cards.length, "finding") : "");
};
const search = searchable(filter, 40);
for (const item of all("#counts li")) {
  const button = make("button", "", ...item.childNodes);
  button.type = "button";
  button.addEventListener("click", () => search("status:" + item.dataset.status));
  item.append(button);
}
// An open finding shows its nodes in the grid.
cards.forEach((card, at) => card.addEventListener("toggle", () => {
  const runs = findings[at];
  for (let run = 0; run < runs.length; run += 2) {
    for (let number = runs[run]; number < runs[run] + runs[run + 1]; number += 1) {
      squares[number].classList.toggle("of-open", card.open);
    }
  }
}));
window.requestIdleCallback?.(indexed);
grid.classList.add("scripted");
follow();
